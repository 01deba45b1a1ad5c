"""Layers fitted to their converted predecessors: exact where they are, nearer where not (M8)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_ext.mla.config import MLAConfig
from megatron_ext.mla.convert import convert_layer
from megatron_ext.mla.forward import attention_output, normalised
from megatron_ext.mla.layers import AttentionLayer, LatentLayer
from megatron_ext.mla.presets import preset
from megatron_ext.mla.refit import refit_output
from megatron_ext.mla.sequential import convert_sequentially, latent_output, seen_moments
from tests.mla.reference import architecture, random_inputs, random_tensors

NUM_LAYERS = 3


class Stack:
    """Three layers with residuals and a feed-forward part, and sequences to fit on."""

    def __init__(self, name: str, *, sequences: int = 3, tokens: int = 40) -> None:
        shape = architecture(name)
        self.layers = [
            AttentionLayer.of(random_tensors(shape, seed=i), shape, dtype=torch.float64)
            for i in range(NUM_LAYERS)
        ]
        self.hidden_STD = torch.stack(
            [random_inputs(shape, seed=10 + i, tokens=tokens) for i in range(sequences)]
        )
        draw = torch.Generator().manual_seed(4)
        size = shape.hidden_size
        self.mix_LDD = torch.randn(NUM_LAYERS, size, size, generator=draw, dtype=torch.float64)

    def inputs(self, index: int, hidden_STD: Tensor) -> Tensor:
        return normalised(hidden_STD, epsilon=1e-6)

    def advance(self, index: int, hidden_STD: Tensor, outputs_STD: Tensor) -> Tensor:
        hidden_STD = hidden_STD + outputs_STD
        inner_STD = self.inputs(index, hidden_STD) @ self.mix_LDD[index] / hidden_STD.shape[-1]
        return hidden_STD + inner_STD.tanh()

    def convert(self, config: MLAConfig, *, rank: int) -> list[LatentLayer]:
        found = convert_sequentially(
            self.layers,
            self.hidden_STD,
            inputs=self.inputs,
            advance=self.advance,
            config=config,
            rank=rank,
        )
        return [layer for layer, _ in found]

    def run(self, layers: list[LatentLayer] | list[AttentionLayer]) -> Tensor:
        """Hidden states after the last layer."""
        hidden_STD = self.hidden_STD
        for index, layer in enumerate(layers):
            output = latent_output if isinstance(layer, LatentLayer) else attention_output
            x_STD = self.inputs(index, hidden_STD)
            outputs_STD = torch.stack([output(layer, x_TD) for x_TD in x_STD])  # pyright: ignore[reportArgumentType]
            hidden_STD = self.advance(index, hidden_STD, outputs_STD)
        return hidden_STD


def test_moments_are_those_of_all_tokens():
    stack = Stack("gqa", tokens=7)
    seen_STD = stack.hidden_STD.flip(0)
    seen_DD, crossed_DD = seen_moments(stack.hidden_STD.float(), seen_STD)
    x_ND, s_ND = stack.hidden_STD.float().double().flatten(0, 1), seen_STD.flatten(0, 1)
    torch.testing.assert_close(seen_DD, s_ND.T @ s_ND / 21)
    torch.testing.assert_close(crossed_DD, x_ND.T @ s_ND / 21)


@pytest.mark.parametrize("method", ["paper-joint", "best"])
@pytest.mark.parametrize("name", ["gqa", "biased", "normed"])
def test_an_exact_conversion_is_not_changed(name, method):
    stack = Stack(name, tokens=14)
    config = preset(method, rope_pairs=6, rope_strategy="high", sequential_compensation=True)
    if name == "normed":
        config = replace(config, query_refit_steps=0)
    layers = stack.convert(config, rank=24)
    # what refits find to gain is rounding, times 1 / ridge
    expected = stack.run(stack.layers)
    torch.testing.assert_close(stack.run(layers), expected, rtol=0, atol=1e-7)
    alone = stack.convert(replace(config, sequential_compensation=False), rank=24)
    for layer, other in zip(layers, alone, strict=True):
        torch.testing.assert_close(layer.query_rotary_HCE, other.query_rotary_HCE)


def test_outputs_are_fitted_to_what_is_wanted():
    stack = Stack("gqa")
    config = preset("paper-joint", rope_pairs=6, rope_strategy="high")
    layer, inputs_STD = stack.layers[0], stack.inputs(0, stack.hidden_STD)
    converted, _ = convert_layer(layer, config=config, rank=24)
    wanted_STD = 2 * torch.stack([attention_output(layer, x_TD) for x_TD in inputs_STD])
    fitted_DHV = refit_output(layer, converted, inputs_STD=inputs_STD, wanted_STD=wanted_STD)
    lost = (fitted_DHV - 2 * layer.output_DHV).norm() / layer.output_DHV.norm()
    assert lost < 0.1, "but for the pull towards the present ones"


@pytest.mark.parametrize("method", ["whitened", "best"])
@pytest.mark.parametrize("name", ["gqa", "biased"])
def test_compensated_layers_end_nearer_to_the_original(name, method):
    stack = Stack(name)
    expected = stack.run(stack.layers)
    errors = {}
    for is_compensated in (False, True):
        config = preset(method, rope_pairs=3, sequential_compensation=is_compensated)
        layers = stack.convert(config, rank=12)
        errors[is_compensated] = float((stack.run(layers) - expected).square().sum())
    assert errors[True] < errors[False]
    assert errors[False] > 1e-3 * float(expected.square().sum()), "nothing was lost"
