"""What the benchmark `mha2mla` compares: published methods, a ladder of ideas, rotation alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron_ext.mla.config import MLAConfig
from megatron_ext.mla.presets import preset

_SHARED = {"mla_layout": "deepseek", "rope_pairs": 16, "rope_stride": 2}
"""A rotary key for all heads of 16 slots for 32 pairs."""
_NO_REFIT = {"query_refit_steps": 0, "output_refit": False}
METHODS: Mapping[str, MLAConfig] = {
    "paper": preset("paper-joint", rope_strategy="2-norm", rope_pairs=4, rope_compensation=False),
    "uniform joint": preset(
        "paper-joint", rope_strategy="uniform", rope_pairs=4, rope_compensation=False
    ),
    "transmla": preset("transmla", rope_strategy="2-norm", rope_fold=4, **_SHARED),
    "care-u": preset("whitened", kv_split=True, rope_strategy="2-norm", rope_fold=4, **_SHARED),
    "ours, paper": preset("best", rope_pairs=8),
    "ours, deepseek": preset("best", **_SHARED),
}
LADDER: Mapping[str, MLAConfig] = {
    "1 weights": preset("paper-joint", **_SHARED),
    "2 whitened": preset("whitened", **_SHARED),
    "3 balanced": preset("whitened", kv_balance="energy", **_SHARED),
    "4 token weights": preset("best", metric_exponent=0.0, **_NO_REFIT, **_SHARED),
    "5 metric": preset("best", **_NO_REFIT, **_SHARED),
    "6 refits": preset("best", **_SHARED),
}
ROTARY: Mapping[str, MLAConfig] = {
    "all pairs": preset("paper-joint", rope_strategy="high", rope_pairs=32),
    "transmla, 16 slots": replace(METHODS["transmla"], recalibrate=False),
    "ours, 16 slots": preset("best", **_NO_REFIT, **_SHARED),
    "ours, 32 slots": preset(
        "best", mla_layout="deepseek", rope_pairs=32, rope_stride=1, **_NO_REFIT
    ),
}
"""At full rank, where only rotation is lost; for models with 32 pairs."""
