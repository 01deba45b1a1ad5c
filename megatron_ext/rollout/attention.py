"""Attention of a step's tokens to the slots of a cache.

The tokens of running requests go through one masked kernel over views of the cache: query heads
that share a key are its query rows, so nothing is repeated or gathered.  A piece of a prompt goes
alone, against its own slot.
Invariant the tests check: equal to attention over each sequence from scratch.

Legend: T tokens of the step, B slots, G key/value heads, R query heads of each, S positions, D and
V widths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.rollout.step_plan import Piece, StepPlan


@dataclass(frozen=True, kw_only=True)
class CacheIndex:
    """A plan's places in the cache as tensors, made once a step for all layers."""

    slots_T: Tensor
    positions_T: Tensor
    num_running: int
    num_rows: int
    """Slots that the kernel of the running requests covers, from slot 0 on."""
    length: int
    """Positions that it covers."""
    is_dense: bool
    """Whether the running requests fill those slots, in order."""
    mask_B11S: Tensor
    """0 where a running request attends, else -inf; in the attention's type."""
    pieces: list[tuple[Piece, Tensor | None]]
    """With the mask [tokens, positions] of each; None = causal from the first position on."""

    @classmethod
    def of(cls, plan: StepPlan, *, dtype: torch.dtype, device: torch.device) -> CacheIndex:
        """The index of a plan."""
        running = plan.num_running
        positions_T = torch.tensor(plan.positions, device=device)
        slots_T = torch.tensor(plan.slots, device=device)
        num_rows = plan.slots[running - 1] + 1 if running else 0
        length = max(plan.positions[:running], default=-1) + 1
        last_B = positions_T[:running]
        if num_rows != running:
            last_B = positions_T.new_zeros(num_rows).index_copy(0, slots_T[:running], last_B)
        is_hidden_BS = torch.arange(length, device=device) > last_B[:, None]
        mask_BS = torch.zeros(num_rows, length, dtype=dtype, device=device)
        mask_BS.masked_fill_(is_hidden_BS, -torch.inf)
        return cls(
            slots_T=slots_T,
            positions_T=positions_T,
            num_running=running,
            num_rows=num_rows,
            length=length,
            is_dense=num_rows == running,
            mask_B11S=mask_BS[:, None, None],
            pieces=[(piece, _mask_of(piece, device=device)) for piece in plan.pieces],
        )


def _mask_of(piece: Piece, *, device: torch.device) -> Tensor | None:
    """Which positions each token of a piece sees, where it does not begin its prompt."""
    _, start, length = piece
    if not start:
        return None
    return torch.ones(length, start + length, dtype=torch.bool, device=device).tril(start)


def write(cache_BGSD: Tensor, values_TGD: Tensor, index: CacheIndex) -> None:
    """Store the step's vectors in the slots of their sequences."""
    cache_BGSD[index.slots_T, :, index.positions_T] = values_TGD


def cached_attention(
    q_TGRD: Tensor,
    keys_BGSD: Tensor,
    values_BGSV: Tensor,
    *,
    index: CacheIndex,
    softmax_scale: float,
) -> Tensor:
    """[T, G * R * V]: every token sees its slot up to itself; the cache has the step's own."""
    parts = []
    if index.num_running:
        parts.append(
            _running_attention(
                q_TGRD[: index.num_running], keys_BGSD, values_BGSV, index, scale=softmax_scale
            ).flatten(1)
        )
    first = index.num_running
    for piece, mask_nS in index.pieces:
        q_nGRD = q_TGRD[first : first + piece.length]
        out_nGRV = _piece_attention(
            q_nGRD, keys_BGSD, values_BGSV, piece, mask_nS, scale=softmax_scale
        )
        parts.append(out_nGRV.flatten(1))
        first += piece.length
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _running_attention(
    q_nGRD: Tensor, keys_BGSD: Tensor, values_BGSV: Tensor, index: CacheIndex, *, scale: float
) -> Tensor:
    slots_n = index.slots_T[: index.num_running]
    q_BGRD = q_nGRD
    if not index.is_dense:
        q_BGRD = q_nGRD.new_zeros(index.num_rows, *q_nGRD.shape[1:]).index_copy(0, slots_n, q_nGRD)
    out_BGRV = F.scaled_dot_product_attention(
        q_BGRD,
        keys_BGSD[: index.num_rows, :, : index.length],
        values_BGSV[: index.num_rows, :, : index.length],
        attn_mask=index.mask_B11S,
        scale=scale,
    )
    return out_BGRV if index.is_dense else out_BGRV[slots_n]


def _piece_attention(
    q_nGRD: Tensor,
    keys_BGSD: Tensor,
    values_BGSV: Tensor,
    piece: Piece,
    mask_nS: Tensor | None,
    *,
    scale: float,
) -> Tensor:
    slot, start, length = piece
    end, heads = start + length, q_nGRD.shape[2]
    q_GRnD = q_nGRD.permute(1, 2, 0, 3)
    k_GRSD = keys_BGSD[slot, :, None, :end].expand(-1, heads, -1, -1)
    v_GRSV = values_BGSV[slot, :, None, :end].expand(-1, heads, -1, -1)
    out_GRnV = F.scaled_dot_product_attention(
        q_GRnD, k_GRSD, v_GRSV, attn_mask=mask_nS, is_causal=mask_nS is None, scale=scale
    )
    return out_GRnV.permute(2, 0, 1, 3)
