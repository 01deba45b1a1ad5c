"""A tiny layer with its sequence, statistics and conversions, for the tests of this room."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_ext.mla.config import MLAConfig
from megatron_ext.mla.convert import convert_layer
from megatron_ext.mla.layers import AttentionLayer, LatentLayer
from megatron_ext.mla.presets import preset
from megatron_ext.mla.rotary_pairs import RotaryPairs, rotary_pairs
from megatron_ext.mla.statistics import LayerStatistics, sequence_statistics
from megatron_ext.weights.architecture import Architecture
from tests.mla.reference import architecture, original_attention, random_inputs, random_tensors

EXACT = {"rtol": 0, "atol": 1e-9}
"""Outputs are of the order of 1."""
PLAIN = preset("paper-joint", rope_compensation=False)


class Case:
    """A tiny layer, a sequence, its statistics, and what the original makes of it."""

    def __init__(self, name: str, **changes: Any) -> None:
        self.shape: Architecture = architecture(name, **changes)
        self.tensors = random_tensors(self.shape)
        self.layer = AttentionLayer.of(self.tensors, self.shape, dtype=torch.float64)
        self.pairs: RotaryPairs = rotary_pairs(self.shape.rope, head_size=self.shape.head_size)
        self.x_TD = random_inputs(self.shape)
        self.full_rank = min(
            self.shape.hidden_size, 2 * self.shape.num_groups * self.shape.head_size
        )

    def statistics(self) -> LayerStatistics:
        return sequence_statistics(self.layer, self.x_TD, keep=True)

    def original(self, **changes: Any) -> Tensor:
        return original_attention(
            self.tensors,
            self.shape,
            self.x_TD,
            frequencies_P=self.pairs.frequencies_P,
            rotary_scale=self.pairs.scale,
            **changes,
        )

    def rank(self, config: MLAConfig) -> int:
        """The highest rank of keys and values."""
        kept = 2 * config.rope_pairs if config.mla_layout == "paper" else 0
        rows = self.shape.num_groups * (2 * self.shape.head_size - kept)
        return min(self.shape.hidden_size, rows)

    def convert(self, config: MLAConfig, **changes: Any) -> LatentLayer:
        found = {"rank": self.rank(config), "statistics": self.statistics()} | changes
        found.setdefault("recalibrated", self.statistics())  # one layer: rotation is behind it
        return convert_layer(self.layer, config=config, **found)[0]
