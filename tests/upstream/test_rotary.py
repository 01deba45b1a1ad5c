"""Rotating a packed row at once gives the bits of Megatron's one sequence at a time."""

from __future__ import annotations

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.rotary import RowRotary, positions_in_segments
from tests.ranks import RankPool
from tests.upstream.jobs import LLAMA, build


def test_positions_restart_at_every_border() -> None:
    borders = torch.tensor([0, 3, 3, 5, 9, 9], dtype=torch.int32)
    assert positions_in_segments(borders).tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert positions_in_segments(torch.tensor([0])).tolist() == []


def rotated(flags: list[str], borders: list[int]) -> tuple[Tensor, Tensor]:
    """Queries of a packed row through the model's rotary embedding, and Megatron's own way."""
    with device_mode():
        _, layout, model, _ = build([*LLAMA, *flags])
        [bare] = model.bare_chunks
        assert isinstance(bare.rotary_pos_emb, RowRotary)
        cu_seqlens = torch.tensor(borders, dtype=torch.int32)
        longest = int(cu_seqlens.diff().max())
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        length = bare.rotary_pos_emb.get_rotary_seq_len(None, None, None, bare.config, packed)
        found = bare.rotary_pos_emb(length, packed_seq=True)
        plain = bare.rotary_pos_emb.rotary(longest, packed_seq=True)
        query_THD = torch.randn(borders[-1], 4, 8, generator=torch.Generator().manual_seed(0))
        return tuple(
            apply_rotary_pos_emb(
                query_THD,
                angles[0] if isinstance(angles, tuple) else angles,
                bare.config,
                cu_seqlens=cu_seqlens,
                cp_group=layout.groups.cp,
            )
            for angles in (found, plain)
        )


@pytest.mark.parametrize("borders", [[0, 3, 10, 11], [0, 6], [0, 4, 4, 9, 9]], ids=str)
def test_a_row_at_once_is_bit_equal(ranks: RankPool, borders: list[int]) -> None:
    [(mine, megatrons)] = ranks(1).run(rotated, [], borders)
    assert torch.equal(mine, megatrons)
