"""Causal attention inside each sequence of a packed row: block-diagonal, never a row x row mask.

Legend: T positions, H query heads, G key/value heads, D query/key width, V value width, B rows,
S positions of a row.
Idea: one `scaled_dot_product_attention` a segment, so time is the sum of n^2 over the segments.
Invariant the tests check: a segment's output and gradients are the same bits wherever it lies in a
row and whatever lies beside it.  The CPU kernels round differently when the operands are aligned
differently in memory or when segments share a call, so every segment gets fresh copies and its own.
Not covered: context parallelism; on GPU the same slot belongs to flash kernels of variable length.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def packed_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGV: Tensor,
    *,
    cu_seqlens: Tensor | Sequence[int],
    softmax_scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention output [T, H, V]; every position sees its own segment up to itself.

    cu_seqlens: segment borders from 0 to T, empty segments allowed.
    H must be a multiple of G (grouped-query attention).  V may differ from D.
    softmax_scale: None = 1 / sqrt(D).
    dropout: probability of dropping an attention weight; above 0 the kernel holds n x n weights of
    one segment at a time, and the bits depend on the random state.
    """
    lengths = _segment_lengths(cu_seqlens, q_THD, k_TGD, v_TGV)
    width, value_width = q_THD.shape[-1], v_TGV.shape[-1]
    scale = width**-0.5 if softmax_scale is None else softmax_scale
    # The fused kernel wants equal widths; zero columns add exactly nothing to scores or values.
    q_THD, k_TGD = (_widened(x, value_width) for x in (q_THD, k_TGD))
    v_TGV = _widened(v_TGV, width)
    outputs = [
        _segment_attention(*parts, scale=scale, dropout=dropout)
        for parts in zip(*(x.split(lengths) for x in (q_THD, k_TGD, v_TGV)), strict=True)
        if len(parts[0])
    ]
    if not outputs:
        return q_THD[..., :value_width]
    return torch.cat(outputs)[..., :value_width]


def dense_attention(
    q_BSHD: Tensor,
    k_BSGD: Tensor,
    v_BSGV: Tensor,
    *,
    softmax_scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Causal attention over padded rows [B, S, H, V]: `packed_attention`, one segment a row."""
    rows, width = q_BSHD.shape[:2]
    out_THV = packed_attention(
        *(x.flatten(0, 1) for x in (q_BSHD, k_BSGD, v_BSGV)),
        cu_seqlens=range(0, (rows + 1) * width, width) if width else [0],
        softmax_scale=softmax_scale,
        dropout=dropout,
    )
    return out_THV.unflatten(0, (rows, width))


def _segment_attention(
    q_nHD: Tensor, k_nGD: Tensor, v_nGD: Tensor, *, scale: float, dropout: float
) -> Tensor:
    """Causal attention of one segment [n, H, D], on operands that always lie alike in memory."""
    q, k, v = (
        x.transpose(0, 1)[None].clone(memory_format=torch.contiguous_format)
        for x in (q_nHD, k_nGD, v_nGD)
    )
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, dropout_p=dropout, enable_gqa=q.shape[1] != k.shape[1]
    )
    if out.requires_grad:
        out.register_hook(lambda grad: grad.clone(memory_format=torch.contiguous_format))
    return out[0].transpose(0, 1)


def _widened(x: Tensor, width: int) -> Tensor:
    """Zero columns up to `width` in the last dimension."""
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def _segment_lengths(
    cu_seqlens: Tensor | Sequence[int], q_THD: Tensor, k_TGD: Tensor, v_TGV: Tensor
) -> list[int]:
    """Lengths of the segments; ValueError for borders or shapes that do not fit together."""
    if not (
        q_THD.ndim == k_TGD.ndim == v_TGV.ndim == 3
        and q_THD.shape[0] == k_TGD.shape[0] == v_TGV.shape[0]
        and k_TGD.shape[1] == v_TGV.shape[1]
        and q_THD.shape[2] == k_TGD.shape[2]
        and q_THD.shape[1] % k_TGD.shape[1] == 0
    ):
        raise ValueError(
            f"q {list(q_THD.shape)}, k {list(k_TGD.shape)}, v {list(v_TGV.shape)} are not "
            "[T, H, D], [T, G, D], [T, G, V] with H a multiple of G."
        )
    borders = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
    lengths = [end - start for start, end in pairwise(borders)]
    if not borders or borders[0] != 0 or borders[-1] != len(q_THD) or min(lengths, default=0) < 0:
        raise ValueError(
            f"cu_seqlens {borders[:4]}...{borders[-1:]} must rise from 0 to {len(q_THD)} positions."
        )
    return lengths
