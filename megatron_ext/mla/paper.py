"""The layout of MHA2MLA: every KV head keeps its own r rotary pairs, the rest becomes plain.

arXiv 2502.14837, section 3.1.  Plain key widths are, in this order, the real parts of dropped
pairs, their imaginary parts, and widths that were never turned.  Queries of dropped pairs are
multiplied by conj(m) of `logit_residual` where that is wanted (not in the paper).
Invariant the tests check: with the latent at full rank, the layer is the original one whose dropped
pairs have the angle zero (and the factor m).

Legend: as in `layers`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.mla.layers import AttentionLayer, LatentNorms
from megatron_ext.mla.logit_residual import LogitResiduals
from megatron_ext.mla.selection import dropped_pairs
from megatron_ext.mla.split import RotarySplit


def split_heads(
    layer: AttentionLayer,
    *,
    kept_GK: Tensor,
    residuals: LogitResiduals | None = None,
    is_compensated: bool = False,
) -> RotarySplit:
    """Keep the pairs `kept_GK` of every KV head.

    residuals: of the layer's heads; None = not known, and no compensation.

    Raises:
        ValueError: compensation is wanted of a layer with norms of queries and keys.
    """
    if is_compensated and layer.has_qk_norm:
        raise ValueError(
            "queries are normalised (qk-norm) before RoPE, so no factor on them can be part of the "
            "weights. Use --no-rope-compensation."
        )
    pairs, groups = layer.pairs, layer.num_groups
    dropped_GL = dropped_pairs(kept_GK, num_pairs=pairs.count)
    rotary_GC = torch.cat((pairs.first_P[kept_GK], pairs.second_P[kept_GK]), dim=1)
    plain_GN = torch.cat(
        (pairs.first_P[dropped_GL], pairs.second_P[dropped_GL], pairs.plain.expand(groups, -1)),
        dim=1,
    )
    per_group = layer.heads_per_group
    maps_HWN = _chosen(plain_GN, layer).repeat_interleave(per_group, 0)
    if is_compensated:
        assert residuals is not None, "compensation needs residuals"
        dropped_HL = dropped_GL.repeat_interleave(per_group, 0)
        factor_HL = residuals.factor_HP.gather(1, dropped_HL).conj().to(maps_HWN.dtype.to_complex())
        maps_HWN = _with_factors(maps_HWN, factor_HL)
    bias_GW = layer.key_bias_GW
    key_bias_GC = None if bias_GW is None else bias_GW.gather(1, rotary_GC)
    return RotarySplit(
        query_rotary_HWC=_chosen(rotary_GC, layer).repeat_interleave(per_group, 0),
        query_plain_HWN=maps_HWN,
        key_rotary_BCD=_rows(layer.key_GWD, rotary_GC),
        key_rotary_bias_BC=key_bias_GC,
        key_plain_GND=_rows(layer.key_GWD, plain_GN),
        frequencies_BK=pairs.frequencies_P[kept_GK],
        softmax_scale=layer.softmax_scale,
        norms=_norms(layer, rotary_GC, plain_GN),
        rotary_loss=_loss(residuals, dropped_GL, is_compensated=is_compensated),
    )


def _chosen(widths_GX: Tensor, layer: AttentionLayer) -> Tensor:
    """Maps [G, W, X] that pick widths."""
    eye_WW = torch.eye(layer.pairs.head_size, dtype=layer.query_HWD.dtype)
    return eye_WW[widths_GX].transpose(1, 2)


def _rows(weight_GWD: Tensor, widths_GX: Tensor) -> Tensor:
    return torch.stack([weight[rows] for weight, rows in zip(weight_GWD, widths_GX, strict=True)])


def _with_factors(maps_HWN: Tensor, factor_HL: Tensor) -> Tensor:
    """Maps to [real, imaginary, plain] widths, the complex ones times factors."""
    count = factor_HL.shape[1]
    real, imaginary, plain = maps_HWN.split([count, count, maps_HWN.shape[2] - 2 * count], dim=2)
    c, s = factor_HL.real[:, None], factor_HL.imag[:, None]
    return torch.cat((real * c - imaginary * s, real * s + imaginary * c, plain), dim=2)


def _norms(layer: AttentionLayer, rotary_GC: Tensor, plain_GN: Tensor) -> LatentNorms | None:
    if layer.query_norm_W is None or layer.key_norm_W is None:
        return None
    return LatentNorms(
        query_rotary_GC=layer.query_norm_W[rotary_GC],
        query_plain_GN=layer.query_norm_W[plain_GN],
        key_rotary_GC=layer.key_norm_W[rotary_GC],
        key_plain_GN=layer.key_norm_W[plain_GN],
        epsilon=layer.norm_epsilon,
    )


def _loss(
    residuals: LogitResiduals | None, dropped_GL: Tensor, *, is_compensated: bool
) -> float | None:
    if residuals is None:
        return None
    groups = len(dropped_GL)
    scores_GP = residuals.scores(num_groups=groups, is_compensated=is_compensated)
    total = float(residuals.total_HP.sum())
    return float(scores_GP.gather(1, dropped_GL).sum()) / total if total else 0.0
