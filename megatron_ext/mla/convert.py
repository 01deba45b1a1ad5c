"""One layer's conversion: weights, statistics and options in; converted weights and a report out.

Invariants the tests check: with all pairs kept (in layout `deepseek`: one KV head, one pair a slot)
and the latent at full rank the layer is the original; with fewer pairs it is the original whose
dropped pairs stand still; products of factors do not depend on the type of the weights but for its
rounding.

Legend: as in `layers`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_ext.mla.config import FOUND, MLAConfig
from megatron_ext.mla.deepseek import energy_directions, residual_directions, split_shared
from megatron_ext.mla.latent import Latent, compress, needed
from megatron_ext.mla.layers import AttentionLayer, LatentLayer
from megatron_ext.mla.logit_residual import LogitResiduals
from megatron_ext.mla.low_rank import energy, factorise
from megatron_ext.mla.paper import split_heads
from megatron_ext.mla.refit import latent_outputs, original_output, refit_output, refit_queries
from megatron_ext.mla.selection import norm_scores, pairs_by_rule, pairs_by_score
from megatron_ext.mla.sizes import CacheSize, cache_of
from megatron_ext.mla.split import RotarySplit, query_weights
from megatron_ext.mla.statistics import LayerStatistics

_REPORTED_TOKENS = 4096
"""Of kept sequences, on which the error of outputs is measured; one sequence at least."""


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """What a layer's conversion did; errors are squared, relative to what should be there."""

    pairs_BK: Tensor
    """Pairs of each rotary key: those kept, or those at whose frequency a slot turns."""
    rotary_loss: float | None
    """Share of the logits' variance by rotation that is lost; None = not calibrated."""
    singular_values: Tensor
    tail_share: float
    """Share of what was minimised beyond the rank."""
    key_error: float
    """Of plain keys, over calibration tokens (over weights where nothing was calibrated)."""
    value_error: float
    output_error: float | None
    """Of the attention's output on kept sequences; None without."""
    cache: CacheSize


def convert_layer(
    layer: AttentionLayer,
    *,
    config: MLAConfig,
    rank: int,
    statistics: LayerStatistics | None = None,
    recalibrated: LayerStatistics | None = None,
) -> tuple[LatentLayer, LayerReport]:
    """Convert one layer; `rank` is R (`sizes.latent_rank`), the weights keep their type.

    recalibrated: sums of the inputs behind partial rotation (`recalibration`), for `recalibrate`.

    Raises:
        ValueError: the options do not fit the layer, or need statistics that are missing.
    """
    split, pairs_BK = split_layer(layer, config=config, statistics=statistics)
    if config.recalibrate:
        statistics = _recalibrated(statistics, recalibrated)
    latent = compress(split, layer, config=config, rank=rank, statistics=statistics)
    converted = assemble(split, latent, layer)
    if config.needs_inputs:
        converted = _refitted(layer, converted, split, config=config, statistics=statistics)
    if config.q_rank:
        moment_DD = needed(statistics).moment() if config.whitening else None
        converted = with_query_latent(
            converted, rank=config.q_rank, moment_DD=moment_DD, ridge=config.moment_ridge
        )
    moment_DD = None if statistics is None else statistics.moment()
    return converted, LayerReport(
        pairs_BK=pairs_BK,
        rotary_loss=split.rotary_loss,
        singular_values=latent.singular_values,
        tail_share=latent.tail_share,
        key_error=_error(split.key_plain_GND, latent.key_up_GNR, latent.down_RD, moment_DD),
        value_error=_error(layer.value_GVD, latent.value_up_GVR, latent.down_RD, moment_DD),
        output_error=_output_error(layer, converted, statistics),
        cache=cache_of(converted),
    )


def _recalibrated(
    statistics: LayerStatistics | None, recalibrated: LayerStatistics | None
) -> LayerStatistics:
    """The statistics for the latent: the second moment is that of the second pass."""
    if recalibrated is None:
        raise ValueError(
            "--recalibrate: there are no sums of the model with partial rotation here. Convert a "
            "checkpoint with --calibration-data, or use --no-recalibrate."
        )
    return needed(statistics).with_moment_of(recalibrated)


def split_layer(
    layer: AttentionLayer, *, config: MLAConfig, statistics: LayerStatistics | None
) -> tuple[RotarySplit, Tensor]:
    """The rotary and plain parts of a layer, and the pairs [B, K] of its rotary keys."""
    residuals = None if statistics is None else LogitResiduals.of(statistics.gram_HPFF)
    if config.rope_strategy == "residual":
        needed(statistics)
    is_shared = config.mla_layout == "deepseek"
    if config.rope_pairs == FOUND or (is_shared and config.rope_stride == FOUND):
        raise ValueError(
            "--rope-pairs and --rope-stride are not known: find the best by `best_division`."
        )
    if is_shared:
        return _split_deepseek(layer, config=config, statistics=statistics, residuals=residuals)
    kept_GK = kept_pairs(layer, config=config, statistics=statistics, residuals=residuals)
    split = split_heads(
        layer, kept_GK=kept_GK, residuals=residuals, is_compensated=config.is_compensated
    )
    return split, kept_GK


def kept_pairs(
    layer: AttentionLayer,
    *,
    config: MLAConfig,
    statistics: LayerStatistics | None,
    residuals: LogitResiduals | None,
) -> Tensor:
    """The pairs [G, K] that every KV head keeps in layout `paper`."""
    kept, groups = config.rope_pairs, layer.num_groups
    if config.rope_strategy == "2-norm":
        found = needed(statistics)
        scores_GP = norm_scores(
            found.query_norms_HP / found.tokens,
            found.key_norms_GP / found.tokens,
            combine=config.rope_norm_score,
        )
        return pairs_by_score(scores_GP, kept=kept)
    if config.rope_strategy == "residual":
        assert residuals is not None
        scores_GP = residuals.scores(num_groups=groups, is_compensated=config.is_compensated)
        return pairs_by_score(scores_GP, kept=kept)
    start = config.rope_uniform_start if config.rope_strategy == "uniform" else 0
    kept_K = pairs_by_rule(
        config.rope_strategy, num_pairs=layer.pairs.count, kept=kept, start=start
    )
    return kept_K.expand(groups, -1)


def _split_deepseek(
    layer: AttentionLayer,
    *,
    config: MLAConfig,
    statistics: LayerStatistics | None,
    residuals: LogitResiduals | None,
) -> tuple[RotarySplit, Tensor]:
    slots, stride = config.rope_pairs, config.rope_stride
    found = needed(statistics)
    if config.rope_strategy == "residual":
        assert residuals is not None
        shared = residual_directions(
            layer,
            found,
            residuals,
            num_slots=slots,
            stride=stride,
            is_compensated=config.is_compensated,
        )
    elif config.rope_strategy == "2-norm":
        fold = config.rope_fold or stride
        shared = energy_directions(layer, found, num_slots=slots, stride=stride, fold=fold)
    else:
        raise ValueError(
            f"--rope-strategy {config.rope_strategy} with --mla-layout deepseek: the frequencies "
            "of a shared key follow from --rope-pairs and --rope-stride. Use residual or 2-norm."
        )
    split = split_shared(
        layer, shared=shared, residuals=residuals, is_compensated=config.is_compensated
    )
    return split, shared.pairs_K[None]


def assemble(split: RotarySplit, latent: Latent, layer: AttentionLayer) -> LatentLayer:
    """A latent layer in the type of the original's weights.

    A bias of values adds the same to every output, because attention weights sum to one: it becomes
    a bias of the output.
    """
    dtype = layer.query_HWD.dtype
    rotary_HCD, rotary_bias_HC = query_weights(layer, split.query_rotary_HWC)
    plain_HND, plain_bias_HN = query_weights(layer, split.query_plain_HWN)
    converted = LatentLayer(
        query_rotary_HCE=rotary_HCD,
        query_plain_HNE=plain_HND,
        query_rotary_bias_HC=rotary_bias_HC,
        query_plain_bias_HN=plain_bias_HN,
        key_rotary_BCD=split.key_rotary_BCD,
        key_rotary_bias_BC=split.key_rotary_bias_BC,
        frequencies_BK=split.frequencies_BK,
        down_RD=latent.down_RD,
        key_up_GNR=latent.key_up_GNR,
        value_up_GVR=latent.value_up_GVR,
        output_DHV=layer.output_DHV,
        output_bias_D=_output_bias(layer),
        norms=split.norms,
        softmax_scale=split.softmax_scale,
    )
    return converted.to(dtype)


def _output_bias(layer: AttentionLayer) -> Tensor | None:
    if layer.value_bias_GV is None:
        return layer.output_bias_D
    bias_HV = layer.value_bias_GV.repeat_interleave(layer.heads_per_group, 0)
    added_D = torch.einsum("dhv,hv->d", layer.output_DHV, bias_HV)
    return added_D if layer.output_bias_D is None else layer.output_bias_D + added_D


def _refitted(
    layer: AttentionLayer,
    converted: LatentLayer,
    split: RotarySplit,
    *,
    config: MLAConfig,
    statistics: LayerStatistics | None,
) -> LatentLayer:
    inputs_STD = needed(statistics).inputs_STD.to(layer.query_HWD.dtype)
    if not len(inputs_STD):
        raise ValueError(
            "refits need kept sequences, and the statistics have none. Calibrate with "
            "--calibration-kept 1 or more, or use --query-refit-steps 0 --no-output-refit."
        )
    if config.query_refit_steps:
        if layer.has_qk_norm:
            raise ValueError(
                "queries are normalised (qk-norm) after their projection, so it cannot be fitted "
                "to the keys. Use --query-refit-steps 0."
            )
        maps_HWN = refit_queries(
            layer,
            converted,
            maps_HWN=split.query_plain_HWN.to(layer.query_HWD.dtype),
            inputs_STD=inputs_STD,
            steps=config.query_refit_steps,
            ridge=config.refit_ridge,
            num_queries=config.calibration_queries,
        )
        plain_HND, bias_HN = query_weights(layer, maps_HWN)
        converted = replace(converted, query_plain_HNE=plain_HND, query_plain_bias_HN=bias_HN)
    if config.output_refit:
        output_DHV = refit_output(layer, converted, inputs_STD=inputs_STD)
        converted = replace(converted, output_DHV=output_DHV)
    return converted


def with_query_latent(
    layer: LatentLayer, *, rank: int, moment_DD: Tensor | None, ridge: float
) -> LatentLayer:
    """The layer whose queries are made from a latent too, the best of that rank."""
    dtype, width = layer.query_plain_HNE.dtype, layer.query_rotary_HCE.shape[1]
    weight_HXD = torch.cat((layer.query_rotary_HCE, layer.query_plain_HNE), dim=1)
    if rank > min(weight_HXD.shape[0] * weight_HXD.shape[1], weight_HXD.shape[2]):
        raise ValueError(f"--q-rank {rank} is above the rank of the queries. Use less, or 0.")
    found = factorise(weight_HXD.flatten(0, 1), rank=rank, moment_DD=moment_DD, ridge=ridge)
    up_HXE = found.up_MR.view(*weight_HXD.shape[:2], rank).to(dtype)
    rotary_HCE, plain_HNE = up_HXE.tensor_split([width], dim=1)
    return replace(
        layer,
        query_rotary_HCE=rotary_HCE,
        query_plain_HNE=plain_HNE,
        query_down_ED=found.down_RD.to(dtype),
    )


def _error(rows_GXD: Tensor, up_GXR: Tensor, down_RD: Tensor, moment_DD: Tensor | None) -> float:
    """Relative squared error of rows made from the latent."""
    rows_MD = rows_GXD.double().flatten(0, 1)
    total = energy(rows_MD, moment_DD)
    lost = energy(rows_MD - up_GXR.flatten(0, 1) @ down_RD, moment_DD)
    return max(lost, 0.0) / total if total > 0 else 0.0


def _output_error(
    layer: AttentionLayer, converted: LatentLayer, statistics: LayerStatistics | None
) -> float | None:
    if statistics is None or not len(statistics.inputs_STD):
        return None
    lost = total = 0.0
    count = max(1, _REPORTED_TOKENS // statistics.inputs_STD.shape[1])
    for x_TD in statistics.inputs_STD[:count].to(layer.query_HWD.dtype):
        wanted_TD = original_output(layer, x_TD)
        found_TD = latent_outputs(converted, x_TD) @ converted.output_DHV.flatten(1).T
        lost += float((found_TD - wanted_TD).double().square().sum())
        total += float(wanted_TD.double().square().sum())
    return lost / total if total else 0.0
