"""What one forward pass consumes: the tokens of a microbatch and what the loss law needs of them.

Legend: B rows, S positions of a row, T = B * S positions.
Invariant: everything the loss needs (weights, the integer count) is in the microbatch before the
first forward; no later stage derives a normaliser from a mask again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """One microbatch of dense or packed rows, identical on every rank of a model replica."""

    tokens_BS: Tensor
    """Input token ids, int64 [B, S]."""
    positions_BS: Tensor
    """Position of each token in its own sequence, int64 [B, S]; restarts at every segment."""
    labels_BS: Tensor
    """Token each position predicts, int64 [B, S]; any valid id where the weight is 0."""
    weights_BS: Tensor
    """Loss weight w_t of each position, float32 [B, S]; 0 where nothing is trained."""
    count: int
    """What this microbatch adds to the normaliser N (an integer, see docs/numerics.md)."""
    padding_BS: Tensor
    """Whether a position is padding, bool [B, S]: no token of any sample."""
    cu_seqlens: Tensor | None = None
    """Segment borders of the packed row, int32 [segments + 1], from 0 to S (then B is 1); None =
    padded rows."""
    extras: dict[str, Tensor] = field(default_factory=dict)
    """More per-token tensors [B, S] a loss needs (old log-probs, advantages, ...)."""

    @property
    def num_positions(self) -> int:
        """Positions computed, padding included."""
        return self.tokens_BS.numel()
