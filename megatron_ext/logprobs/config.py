"""What can be chosen about log-probabilities.

No `from __future__ import annotations` here: Megatron's `ArgumentGroupFactory` reads the types of
the fields, which would be strings.
"""

from dataclasses import dataclass

from megatron_ext.options.ranges import Ranged, ranged


@dataclass(frozen=True, kw_only=True)
class LogProbsConfig(Ranged):
    """Log-probabilities and entropy from hidden states."""

    logprob_chunk_size: int = ranged(1024, at_least=0, note="0 = all at once")
    """Logits held at once, in tokens: never more than those of this many tokens, whatever the
    microbatch (4 bytes x this x vocabulary / tensor-parallel size, about doubled by entropy).
    0 = all at once; they are recomputed in backward all the same."""
