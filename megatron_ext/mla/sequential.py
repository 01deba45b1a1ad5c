"""Conversion of a stack of layers in order, each fitted to what the converted ones before it leave.

A layer behind converted ones sees s instead of x.  Its weights W become the least squares solution
of W' s = W x, as in GPTQ (arXiv 2210.17323) and SparseGPT, and W' is converted with the statistics
of s; both states run side by side through the stack.  Few tokens are soon repeated by heart, so the
fit is pulled towards W.
What surrounds the attention is the caller's: `inputs` (the norm before it) and `advance` (residual,
feed-forward layer), so nothing here knows a model.
Invariants the tests check: a stack converted exactly stays as it is, and a truncated one ends
nearer to the original on the tokens that it was fitted to.

Legend: as in `layers`; S sequences of T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from megatron_ext.mla.config import MLAConfig
from megatron_ext.mla.convert import LayerReport, convert_layer
from megatron_ext.mla.forward import attention_output
from megatron_ext.mla.layers import AttentionLayer, LatentLayer
from megatron_ext.mla.refit import compensated, latent_outputs, refit_output
from megatron_ext.mla.statistics import LayerStatistics, sequence_statistics

Inputs = Callable[[int, Tensor], Tensor]
"""(layer, hidden states [S, T, D]) -> normalised inputs of its attention."""
Advance = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, hidden states, outputs of its attention) -> hidden states of the next layer."""


def seen_moments(original_STD: Tensor, seen_STD: Tensor) -> tuple[Tensor, Tensor]:
    """E[s s^T] and E[x s^T], float64 [D, D]: of inputs behind converted layers, and across.

    original_STD: x, the inputs of the same tokens in the original model.
    """
    size = seen_STD.shape[-1]
    seen_DD, crossed_DD = torch.zeros(2, size, size, dtype=torch.float64)
    for x_TD, s_TD in zip(original_STD.double(), seen_STD.double(), strict=True):
        seen_DD += s_TD.T @ s_TD
        crossed_DD += x_TD.T @ s_TD
    tokens = seen_STD[..., 0].numel()
    return seen_DD / tokens, crossed_DD / tokens


def convert_sequentially(
    layers: Iterable[AttentionLayer],
    hidden_STD: Tensor,
    *,
    inputs: Inputs,
    advance: Advance,
    config: MLAConfig,
    rank: int,
) -> Iterator[tuple[LatentLayer, LayerReport]]:
    """Convert the layers from first to last, one at a time; `rank` is R.

    Without `sequential_compensation` every layer is converted as it is, for its original inputs.

    hidden_STD: hidden states before the first layer, of the sequences to calibrate and fit on.

    Raises:
        ValueError: as `convert_layer`.
    """
    original_STD = seen_STD = hidden_STD
    for index, layer in enumerate(layers):
        x_STD = inputs(index, original_STD)
        outputs_STD = torch.stack([attention_output(layer, x_TD) for x_TD in x_STD])
        original_STD = advance(index, original_STD, outputs_STD)
        if not config.sequential_compensation:
            statistics = _statistics(layer, x_STD, config=config)
            yield convert_layer(layer, config=config, rank=rank, statistics=statistics)
            continue
        s_STD = inputs(index, seen_STD)
        converted, report = _convert_behind_others(
            layer, x_STD, s_STD, wanted_STD=outputs_STD, config=config, rank=rank
        )
        found_STD = torch.stack([latent_output(converted, s_TD) for s_TD in s_STD])
        seen_STD = advance(index, seen_STD, found_STD)
        lost = float((found_STD - outputs_STD).double().square().sum())
        total = float(outputs_STD.double().square().sum())
        yield converted, replace(report, output_error=lost / total if total else 0.0)


def _convert_behind_others(
    layer: AttentionLayer,
    x_STD: Tensor,
    s_STD: Tensor,
    *,
    wanted_STD: Tensor,
    config: MLAConfig,
    rank: int,
) -> tuple[LatentLayer, LayerReport]:
    """Convert the layer that makes of s what the original makes of x, `wanted_STD` in the end."""
    seen_DD, crossed_DD = seen_moments(x_STD, s_STD)
    fitted = compensated(
        layer, seen_moment_DD=seen_DD, crossed_DD=crossed_DD, ridge=config.compensation_ridge
    )
    statistics = _statistics(fitted, s_STD, config=config)
    converted, report = convert_layer(
        fitted, config=replace(config, output_refit=False), rank=rank, statistics=statistics
    )
    if config.output_refit:
        if converted.output_bias_D is not None:
            wanted_STD = wanted_STD - converted.output_bias_D
        output_DHV = refit_output(layer, converted, inputs_STD=s_STD, wanted_STD=wanted_STD)
        converted = replace(converted, output_DHV=output_DHV)
    return converted, report


def latent_output(layer: LatentLayer, x_TD: Tensor) -> Tensor:
    """Output [T, D] of a converted layer, its bias included."""
    out_TD = latent_outputs(layer, x_TD) @ layer.output_DHV.flatten(1).T
    return out_TD if layer.output_bias_D is None else out_TD + layer.output_bias_D


def _statistics(layer: AttentionLayer, inputs_STD: Tensor, *, config: MLAConfig) -> LayerStatistics:
    """Of all sequences, of which as many are kept as refits may look at."""
    return reduce(
        LayerStatistics.__add__,
        (
            sequence_statistics(
                layer,
                x_TD,
                num_queries=config.calibration_queries,
                keep=index < config.calibration_kept,
            )
            for index, x_TD in enumerate(inputs_STD)
        ),
    )
