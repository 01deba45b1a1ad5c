"""The method `transmla` is its authors' mathematics, and what it added left the others alone."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.mla.config import MLAConfig
from megatron_ext.mla.convert import convert_layer
from megatron_ext.mla.forward import attention_output
from megatron_ext.mla.layers import LatentLayer
from megatron_ext.mla.low_rank import factorise
from megatron_ext.mla.presets import preset
from megatron_ext.mla.problems import conversion_problems, text_problems
from megatron_ext.mla.recalibration import full_rank
from megatron_ext.mla.sequential import latent_output
from megatron_ext.mla.statistics import LayerStatistics, input_statistics, sequence_statistics
from tests.mla import reference_transmla
from tests.mla.reference import architecture, random_tensors
from tests.mla.test_sequential import NUM_LAYERS, Stack

METHOD = preset("transmla", mla_layout="deepseek", rope_strategy="2-norm", calibration_data=["x"])
RANK = 9


def total(parts: list[LayerStatistics]) -> LayerStatistics:
    return reduce(LayerStatistics.__add__, parts)


def inputs_behind(stack: Stack, layers) -> list[Tensor]:
    """[S, T, D] of every layer's attention, layers being functions of [T, D]."""
    hidden_STD, found = stack.hidden_STD, []
    for index, layer in enumerate(layers):
        x_STD = stack.inputs(index, hidden_STD)
        found.append(x_STD)
        outputs_STD = torch.stack([layer(x_TD) for x_TD in x_STD])
        hidden_STD = stack.advance(index, hidden_STD, outputs_STD)
    return found


def converted(stack: Stack, name: str, config: MLAConfig) -> list[LatentLayer]:
    """As `upstream.mla_recalibrate` does with a checkpoint."""
    originals = [lambda x_TD, layer=layer: attention_output(layer, x_TD) for layer in stack.layers]
    statistics = [
        total([sequence_statistics(layer, x_TD) for x_TD in x_STD])
        for layer, x_STD in zip(stack.layers, inputs_behind(stack, originals), strict=True)
    ]
    whole = full_rank(config, architecture(name))
    rotated = [
        convert_layer(layer, config=whole, rank=whole.kv_rank, statistics=seen)[0]
        for layer, seen in zip(stack.layers, statistics, strict=True)
    ]
    behind = [lambda x_TD, layer=layer: latent_output(layer, x_TD) for layer in rotated]
    return [
        convert_layer(
            layer,
            config=config,
            rank=RANK,
            statistics=seen,
            recalibrated=total([input_statistics(x_TD) for x_TD in x_STD]),
        )[0]
        for layer, seen, x_STD in zip(
            stack.layers, statistics, inputs_behind(stack, behind), strict=True
        )
    ]


@pytest.mark.parametrize(
    ("name", "fold", "stride"), [("gqa", 2, 2), ("gqa", 6, 2), ("mha", 2, 1), ("llama3", 6, 3)]
)
def test_it_is_the_authors_mathematics(name: str, fold: int, stride: int):
    stack, shape = Stack(name), architecture(name)
    pairs = stack.layers[0].pairs
    options = {"rope_fold": fold, "rope_stride": stride, "rope_pairs": pairs.count // stride}
    found = converted(stack, name, replace(METHOD, **options))
    wanted = [
        reference_transmla.Attention(
            random_tensors(shape, seed=index), shape, pairs.frequencies_P, fold=fold, stride=stride
        )
        for index in range(NUM_LAYERS)
    ]
    reference_transmla.transmla(
        wanted,
        rank=RANK,
        original=[lambda x, layer=layer: attention_output(layer, x) for layer in stack.layers],
        run=lambda layers: inputs_behind(stack, layers),
    )
    x_TD = stack.hidden_STD[1]
    for new, layer, old in zip(found, wanted, stack.layers, strict=True):
        torch.testing.assert_close(latent_output(new, x_TD), layer(x_TD), rtol=0, atol=1e-9)
        # and the test could fail: the latent is small
        assert float((layer(x_TD) - attention_output(old, x_TD)).abs().max()) > 0.1


def test_a_ridge_on_outputs_changes_nothing_and_inverts_nothing():
    draw = torch.Generator().manual_seed(0)
    x_TD = torch.randn(4, 12, generator=draw, dtype=torch.float64)  # fewer tokens than widths
    weight_MD = torch.randn(9, 12, generator=draw, dtype=torch.float64)
    found = factorise(weight_MD, rank=3, moment_DD=x_TD.T @ x_TD, ridge=0.5, ridge_on="outputs")
    vectors = reference_transmla.principal(x_TD @ weight_MD.T)[:, :3]
    torch.testing.assert_close(found.up_MR @ found.down_RD, vectors @ vectors.T @ weight_MD)


def test_sums_of_inputs_are_those_of_all_sums():
    stack = Stack("gqa")
    whole = total([sequence_statistics(stack.layers[0], x) for x in stack.hidden_STD])
    inputs = total([input_statistics(x) for x in stack.hidden_STD])
    joined = inputs.join(replace(inputs, moment_DD=inputs.moment_DD.new_empty(0)))
    for found in (inputs, joined):
        assert torch.equal(found.moment_DD, whole.moment_DD)
        assert torch.equal(found.sum_D, whole.sum_D) and found.tokens == whole.tokens
    twice = whole.with_moment_of(inputs + inputs)
    torch.testing.assert_close(twice.moment(), whole.moment())


def test_a_second_pass_that_is_missing_or_does_not_fit_is_said():
    stack = Stack("gqa")
    statistics = sequence_statistics(stack.layers[0], stack.hidden_STD[0])
    config = replace(METHOD, rope_pairs=3, rope_stride=2, kv_rank=RANK)
    with pytest.raises(ValueError, match="use --no-recalibrate"):
        convert_layer(stack.layers[0], config=config, rank=RANK, statistics=statistics)
    shape = architecture("gqa")
    assert not conversion_problems(config, shape) + text_problems(config)
    assert "without --calibration-data" in text_problems(replace(config, calibration_data=[]))[0]
    for change, flag in (
        ({"token_weight": 0.5}, "--token-weight 0.5 with --recalibrate"),
        ({"sequential_compensation": True}, "--sequential-compensation with --recalibrate"),
        ({"whitening": False}, "--no-whitening with --recalibrate"),
    ):
        wrong = conversion_problems(replace(config, **change), shape)
        assert any(flag in problem for problem in wrong), wrong


@pytest.mark.parametrize("strategy", ["2-norm", "residual"])
@pytest.mark.parametrize("method", ["best", "whitened", "paper-joint"])
def test_the_other_methods_know_nothing_of_it(method, strategy, monkeypatch):
    """Bit-equal with the second pass's sums at hand, and with no channels of plain keys."""
    layer, x_TD = Stack("gqa").layers[0], Stack("gqa").hidden_STD[0]
    statistics = sequence_statistics(layer, x_TD, keep=True)
    options = {"mla_layout": "deepseek", "rope_strategy": strategy}
    config = preset(method, rope_pairs=3, rope_stride=2, **options)
    assert (config.recalibrate, config.ridge_on) == (False, "inputs")

    def weights(**more: LayerStatistics) -> dict[str, Any]:
        found, _ = convert_layer(layer, config=config, rank=RANK, statistics=statistics, **more)
        return vars(found)

    plain, given = weights(), weights(recalibrated=input_statistics(2 * x_TD))
    monkeypatch.setattr("megatron_ext.mla.deepseek._channels", lambda *_: None)
    for other in (given, weights()):
        for name, value in plain.items():
            if isinstance(value, Tensor):
                assert torch.equal(value, other[name]), name
