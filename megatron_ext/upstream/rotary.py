"""Rotary angles of a packed row at once.

Given angles of the longest sequence only, Megatron rotates a packed row one sequence at a time, in
every layer, for queries and for keys: a dozen small operations each.  Given an angle for every
position of the row, it rotates the row in one go.  The angles are the same, so the results are,
bit for bit.  Not covered: fused rotation (``--apply-rope-fusion``), which wants the longest only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor


class RowRotary(torch.nn.Module):
    """Megatron's rotary embedding (plain or YaRN) that knows the borders of the row it is for."""

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self.rotary = rotary
        self._packed: PackedSeqParams | None = None

    def get_rotary_seq_len(self, *args: Any) -> int:
        """Megatron asks for this right before the angles; the last argument are the borders."""
        self._packed = args[-1]
        return self.rotary.get_rotary_seq_len(*args)

    def forward(self, max_seq_len: int, *args: Any, packed_seq: bool = False, **kwargs: Any) -> Any:
        """Angles [positions, 1, 1, width], restarting at every border of a packed row."""
        found = self.rotary(max_seq_len, *args, packed_seq=packed_seq, **kwargs)
        if not packed_seq:
            return found
        assert self._packed is not None
        positions_T = positions_in_segments(self._packed.cu_seqlens_q)
        if isinstance(found, tuple):
            return found[0][positions_T], *found[1:]
        return found[positions_T]


def positions_in_segments(cu_seqlens: Tensor) -> Tensor:
    """Positions [T] of a packed row that restart at 0 at every border; empty segments allowed."""
    starts = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff())
    return torch.arange(len(starts), device=cu_seqlens.device) - starts


def rotate_rows_at_once(chunks: Sequence[MegatronModule]) -> list[MegatronModule]:
    """Give bare model chunks `RowRotary`, where they rotate by themselves and not in attention."""
    for chunk in chunks:
        config: Any = chunk.config
        if (
            getattr(chunk, "position_embedding_type", None) in ("rope", "yarn")
            and not config.multi_latent_attention
            and not config.apply_rope_fusion
        ):
            chunk.rotary_pos_emb = RowRotary(chunk.rotary_pos_emb)
    return list(chunks)
