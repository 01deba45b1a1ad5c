"""Keys and values of a split layer as one latent, by the options of `MLAConfig`.

`low_rank` minimises; here is decided what: which tokens count how much, what an error of a key
channel costs against one of a value channel, and whether both share a latent.
The metric is the second-order change of the layer's output (with independent errors of tokens and
heads): for the values of group g the sum over its heads of alpha_h W_o^T W_o, for its keys that of
E[beta_i q_i q_i^T], alpha and beta as in `statistics`.
Invariants the tests check: a joint latent is not worse than two halves in their own objective; at
full rank keys and values are exact whatever the options.

Legend: as in `layers`; M = G * (N + V) rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.mla.config import MLAConfig
from megatron_ext.mla.layers import AttentionLayer
from megatron_ext.mla.low_rank import (
    LowRank,
    energy,
    factorise,
    mean_row_size,
    tempered_root,
    times_blocks,
)
from megatron_ext.mla.split import RotarySplit
from megatron_ext.mla.statistics import LayerStatistics

_NOTHING = 1e-12
"""Size of plain keys against values, or the reverse, below which there are none, but rounding."""


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Keys and values from a latent; float64."""

    down_RD: Tensor
    key_up_GNR: Tensor
    value_up_GVR: Tensor
    singular_values: Tensor
    """In the units of what was minimised, descending; of two latents one after the other."""
    tail_share: float
    """Share of what was minimised that is lost."""


def compress(
    split: RotarySplit,
    layer: AttentionLayer,
    *,
    config: MLAConfig,
    rank: int,
    statistics: LayerStatistics | None,
) -> Latent:
    """Find the latent of plain keys and values.

    Raises:
        ValueError: the rank is not possible, or statistics are wanted and missing.
    """
    moment_DD, scale_GN = None, None
    if config.whitening:
        moment_DD = needed(statistics).moment(token_weight=config.token_weight)
        scale_GN = split.key_scale(layer, moment_DD)
    key_GND, value_GVD = split.key_plain_GND.double(), layer.value_GVD.double()
    if scale_GN is not None:
        key_GND = key_GND * scale_GN[..., None]
    key_roots, value_roots = _roots(split, layer, config=config, statistics=statistics)
    factor = _balance(
        config,
        times_blocks(key_roots, key_GND.flatten(0, 1)),
        times_blocks(value_roots, value_GVD.flatten(0, 1)),
        channels_XM=split.channels_XM,
        moment_DD=moment_DD,
    )
    parts = [(key_GND.flatten(0, 1) * factor, key_roots), (value_GVD.flatten(0, 1), value_roots)]
    if not config.kv_split:
        parts = [(torch.cat([rows for rows, _ in parts]), key_roots + value_roots)]
    ranks = _ranks(rank, [min(rows.shape) for rows, _ in parts])
    found = [
        factorise(
            rows,
            rank=r,
            moment_DD=moment_DD,
            roots=roots,
            ridge=config.moment_ridge,
            ridge_on=config.ridge_on,
        )
        for (rows, roots), r in zip(parts, ranks, strict=True)
        if r > 0
    ]
    key_up_MR, value_up_MR = _ups(found, num_keys=key_GND.shape[0] * key_GND.shape[1])
    key_up_GNR = key_up_MR.view(*key_GND.shape[:2], rank) / factor
    if scale_GN is not None:
        key_up_GNR = key_up_GNR / scale_GN[..., None]
    total = sum(float(part.singular_values_I.square().sum()) for part in found)
    return Latent(
        down_RD=torch.cat([part.down_RD for part in found]),
        key_up_GNR=key_up_GNR,
        value_up_GVR=value_up_MR.view(*value_GVD.shape[:2], rank),
        singular_values=torch.cat([part.singular_values_I for part in found]),
        tail_share=sum(part.tail for part in found) / total if total else 0.0,
    )


def needed(statistics: LayerStatistics | None) -> LayerStatistics:
    """The statistics.

    Raises:
        ValueError: there are none.
    """
    if statistics is None:
        raise ValueError(
            "these options look at activations: give --calibration-data or "
            "--calibration-statistics, or use --low-rank-method paper-joint with --rope-strategy "
            "high, low or uniform."
        )
    return statistics


def _ranks(rank: int, limits: list[int]) -> list[int]:
    """The rank of one latent, or of two: half each, if both can have it."""
    if len(limits) == 1:
        return [rank]
    first = min(max(rank // 2, rank - limits[1]), limits[0])
    return [first, rank - first]


def _ups(found: list[LowRank], *, num_keys: int) -> tuple[Tensor, Tensor]:
    """Rows of keys and of values over the whole latent; zero where it is not theirs."""
    up_MR = found[0].up_MR if len(found) == 1 else torch.block_diag(*(p.up_MR for p in found))
    return up_MR[:num_keys], up_MR[num_keys:]


def _roots(
    split: RotarySplit,
    layer: AttentionLayer,
    *,
    config: MLAConfig,
    statistics: LayerStatistics | None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Tempered roots of the metric for each KV head's keys and values; none without a metric."""
    if config.metric_exponent == 0:
        return [], []
    keys_GNN, values_GVV = output_metric(split, layer, needed(statistics))
    options = {"exponent": config.metric_exponent, "damping": config.metric_ridge}
    return (
        [tempered_root(metric, **options) for metric in keys_GNN],
        [tempered_root(metric, **options) for metric in values_GVV],
    )


def output_metric(
    split: RotarySplit, layer: AttentionLayer, statistics: LayerStatistics
) -> tuple[Tensor, Tensor]:
    """What errors of plain keys [G, N, N] and values [G, V, V] do to the output, mean per token."""
    groups, tokens = layer.num_groups, statistics.tokens
    maps_HWN = split.query_plain_HWN.double() * split.softmax_scale
    queries_HNN = maps_HWN.mT @ (statistics.metric_HWW / tokens) @ maps_HWN
    output_HDV = layer.output_DHV.double().transpose(0, 1)
    attention_H = statistics.attention_H2[:, 0] / tokens
    outputs_HVV = output_HDV.mT @ output_HDV * attention_H[:, None, None]
    return (
        queries_HNN.unflatten(0, (groups, -1)).sum(1),
        outputs_HVV.unflatten(0, (groups, -1)).sum(1),
    )


def _balance(
    config: MLAConfig,
    key_MD: Tensor,
    value_MD: Tensor,
    *,
    channels_XM: Tensor | None,
    moment_DD: Tensor | None,
) -> float:
    """Factor on keys before the latent is found, undone after."""
    if config.kv_balance == "none":
        return 1.0
    if config.kv_balance == "energy":
        sizes = [energy(rows, moment_DD) ** 0.5 for rows in (value_MD, key_MD)]
    else:
        key_MD = key_MD if channels_XM is None else channels_XM.double() @ key_MD
        sizes = [mean_row_size(rows, moment_DD) for rows in (value_MD, key_MD)]
    if min(sizes) <= _NOTHING * max(sizes):
        return 1.0
    return config.kv_balance_factor**0.5 * sizes[0] / sizes[1]
