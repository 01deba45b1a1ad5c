"""What can be chosen about log-probabilities.

No `from __future__ import annotations` here: Megatron's `ArgumentGroupFactory` reads the types of
the fields, which would be strings.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LogProbsConfig:
    """Log-probabilities and entropy from hidden states."""

    logprob_chunk_size: int = 1024
    """Logits held at once, in tokens: never more than those of this many tokens, whatever the
    microbatch (4 bytes x this x vocabulary / tensor-parallel size, about doubled by entropy).
    0 = all at once; they are recomputed in backward all the same."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for a negative size."""
        if self.logprob_chunk_size < 0:
            raise ValueError(
                f"--logprob-chunk-size {self.logprob_chunk_size} is negative. Use a number of "
                "tokens (1024 is a good start), or 0 for all at once."
            )
