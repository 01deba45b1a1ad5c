"""Cache sizes are those of the cached tensors, and every mismatch is told at once (E8, E17)."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any, get_args

import pytest

from megatron_ext.mla.config import LowRankMethod, MLAConfig
from megatron_ext.mla.convert import convert_layer
from megatron_ext.mla.presets import preset, preset_options
from megatron_ext.mla.problems import conversion_notices, conversion_problems
from megatron_ext.mla.sizes import cache_of, converted_cache, latent_rank, original_cache
from megatron_ext.weights.architecture import Architecture, Latent, Rope
from tests.mla.cases import Case
from tests.mla.reference import architecture

LLAMA = architecture(
    "mha", hidden_size=4096, num_heads=32, num_groups=32, head_size=128, num_layers=32
)
"""Llama-2-7B's attention; MHA2MLA's table 1 keeps 8 of 64 pairs."""


@pytest.mark.parametrize(("dims", "ratio"), [(64, 0.3125), (32, 0.1875), (16, 0.125)])
def test_the_papers_ratios(dims, ratio):
    config = preset("paper-joint", rope_pairs=8, kv_dims_per_head=dims)
    before, after = original_cache(LLAMA).total, converted_cache(config, LLAMA).total
    assert after / before == ratio
    by_ratio = replace(config, kv_dims_per_head=0, cache_ratio=ratio)
    assert latent_rank(by_ratio, LLAMA) == latent_rank(config, LLAMA) == 32 * dims
    small = replace(LLAMA, hidden_size=576, num_heads=9, num_groups=9, head_size=64)
    config = replace(config, rope_pairs=4, kv_dims_per_head=dims // 2)
    assert converted_cache(config, small).total / original_cache(small).total == ratio


@pytest.mark.parametrize(
    ("name", "layout"),
    [("gqa", "paper"), ("mqa", "paper"), ("normed", "paper"), ("gqa", "deepseek")],
)
def test_sizes_are_those_of_cached_tensors(name, layout):
    case = Case(name)
    config = preset(
        "paper-joint", mla_layout=layout, rope_stride=1, rope_pairs=2, rope_compensation=False
    )
    config = replace(config, cache_ratio=0.5)
    rank = latent_rank(config, case.shape)
    layer, report = convert_layer(
        case.layer, config=config, rank=rank, statistics=case.statistics()
    )
    rotary = layer.key_rotary_BCD.shape[0] * layer.key_rotary_BCD.shape[1]
    divisors = case.shape.num_groups if layer.norms else 0
    assert cache_of(layer).total == rotary + layer.down_RD.shape[0] + divisors
    assert cache_of(layer).total == converted_cache(config, case.shape).total
    assert report.cache == cache_of(layer)
    assert cache_of(layer).total == original_cache(case.shape).total // 2


def test_ranks_divide_heads_but_not_the_latent():
    llama3 = replace(LLAMA, num_groups=8)
    config = preset("best", mla_layout="deepseek", rope_stride=1, rope_pairs=32, kv_rank=512)
    before, after = original_cache(llama3), converted_cache(config, llama3)
    assert [before.on_rank(tp_size=tp) for tp in (1, 2, 4, 8)] == [2048, 1024, 512, 256]
    assert [after.on_rank(tp_size=tp) for tp in (1, 8)] == [576, 576]
    assert after.num_bytes(tp_size=8, num_layers=32) == 576 * 32 * 2
    paper = converted_cache(replace(config, mla_layout="paper", rope_pairs=8), llama3)
    assert [paper.on_rank(tp_size=tp) for tp in (1, 8)] == [128 + 512, 16 + 512]
    assert conversion_notices(config, llama3, tp_size=2) == []
    (notice,) = conversion_notices(config, llama3, tp_size=8)
    assert "takes 576 numbers per token and layer on each rank, the original 256" in notice


GOOD = preset("best", rope_pairs=2, rope_stride=1, cache_ratio=0.75)


def problems(name: str = "gqa", *, shape: dict[str, Any] | None = None, **options: Any) -> str:
    config = replace(GOOD, **options)
    return " ".join(conversion_problems(config, architecture(name, **(shape or {}))))


@pytest.mark.parametrize("name", ["mha", "gqa", "mqa", "biased", "llama3", "yarn"])
@pytest.mark.parametrize("layout", ["paper", "deepseek"])
@pytest.mark.parametrize("pairs", [2, -1])
def test_what_fits_has_no_problems(name, layout, pairs):
    assert problems(name, mla_layout=layout, rope_pairs=pairs, cache_ratio=0.4) == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_ratio": 0.0}, "given by none: give exactly one of --kv-rank"),
        ({"kv_rank": 8}, "given by --kv-rank and --cache-ratio: give exactly one"),
        ({"cache_ratio": 0.1}, "--cache-ratio 0.1 leaves -3 numbers of the latent beside 2 rotary"),
        ({"cache_ratio": 0.0, "kv_rank": 41}, "--kv-rank 41 makes a latent of 41 .* --kv-rank 40"),
        ({"cache_ratio": 1.2}, "makes a latent of 50 numbers, but .* a rank of 40 at most"),
        (
            {"cache_ratio": 0.0, "kv_rank": 36, "rope_pairs": 5},
            "makes a latent of 36 numbers, but keys and values have a rank of 28",
        ),
        (
            {"cache_ratio": 0.0, "kv_rank": 40, "rope_pairs": 6, "mla_layout": "deepseek"},
            "a cache of 52 numbers per token and layer, and the original has 48: nothing is saved",
        ),
        ({"rope_pairs": 7}, "--rope-pairs 7: a head has 6 rotary pairs"),
        ({"rope_pairs": 4, "rope_strategy": "uniform"}, "--rope-pairs 4 does not divide the 6"),
        ({"rope_stride": 2}, "--rope-stride is of --mla-layout deepseek"),
        ({"rope_fold": 2}, "--rope-fold is of --mla-layout deepseek"),
        ({"mla_layout": "deepseek", "rope_strategy": "high"}, "--rope-strategy high with --mla-la"),
        (
            {"mla_layout": "deepseek", "rope_stride": 4},
            "--rope-pairs 2 with --rope-stride 4 covers more than the 6",
        ),
        (
            {"rope_pairs": -1, "kv_rank": 8, "cache_ratio": 0.0},
            "--kv-rank without --rope-pairs: only a --cache-ratio can be divided",
        ),
        ({"rope_pairs": -1, "cache_ratio": 0.01}, "--cache-ratio 0.01 leaves no possible latent"),
        ({"whitening": False}, "--token-weight 0.95 looks at activations.*Use --metric-exponent 0"),
    ],
)
def test_options_that_do_not_fit(options, message):
    pattern = message.replace("(", r"\(")
    assert_found(problems(**options), pattern)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_weight": 1.5}, "--token-weight 1.5 must be from 0 to 1"),
        ({"metric_exponent": -0.1}, "--metric-exponent -0.1 must be from 0 to 1"),
        ({"moment_ridge": -1.0}, "--moment-ridge -1.0 must be at least 0"),
        ({"moment_ridge": float("nan")}, "--moment-ridge nan is not a finite number"),
        ({"rope_stride": 0}, "--rope-stride 0 must be at least 1, or -1 (-1 finds it)"),
        ({"rope_pairs": -2}, "--rope-pairs -2 must be at least 0, or -1 (-1 finds it)"),
        ({"kv_balance_factor": 0.0}, "--kv-balance-factor 0.0 must be above 0"),
    ],
)
def test_a_number_out_of_range_is_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        MLAConfig(**options)


def assert_found(text: str, pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        raise ValueError(text)


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        ("gqa", {"sliding_window": 8}, {}, "sliding_window 8: .* sequences of 64 positions"),
        ("gqa", {"rope": Rope(kind="longrope")}, {}, "rope_type 'longrope'"),
        ("gqa", {"rope": Rope(kind="dynamic")}, {}, "rope_type 'dynamic'"),
        ("normed", {}, {"mla_layout": "deepseek"}, "llama normalises .* --mla-layout paper"),
        ("normed", {}, {}, "--no-rope-compensation.*Use --query-refit-steps 0"),
    ],
)
def test_models_that_cannot_be_converted(name, shape, options, message):
    assert_found(problems(name, shape=shape, **options), message)


def test_windows_and_ranks():
    windowed = architecture("gqa", sliding_window=8)
    assert conversion_problems(GOOD, windowed, max_length=8) == []
    (problem,) = conversion_problems(GOOD, architecture("gqa"), tp_size=4)
    assert "--tensor-model-parallel-size 4 does not divide the 2 KV heads" in problem


def test_all_problems_come_in_one_list():
    config = replace(GOOD, rope_pairs=7, kv_rank=5)
    found = conversion_problems(config, architecture("gqa", sliding_window=8), tp_size=4)
    assert len(found) == 4


@pytest.mark.parametrize("name", ["gqa", "normed"])
def test_conversion_itself_refuses_too(name):
    case = Case(name)
    statistics = case.statistics()
    if name == "normed":
        wrong = {
            "rope_compensation": "Use --no-rope-compensation",
            "query_refit_steps": "Use --query-refit-steps 0",
        }
        for flag, message in wrong.items():
            fitting = {"rope_compensation": False, "query_refit_steps": 0} | {flag: 1}
            with pytest.raises(ValueError, match=message):
                config = preset("best", rope_pairs=2, **fitting)
                convert_layer(case.layer, config=config, rank=9, statistics=statistics)
        with pytest.raises(ValueError, match="Use --mla-layout paper"):
            config = preset("whitened", mla_layout="deepseek", rope_stride=1, rope_pairs=2)
            convert_layer(case.layer, config=config, rank=9, statistics=statistics)
    else:
        for config in (replace(GOOD, rope_strategy="high"), preset("paper-joint")):
            with pytest.raises(ValueError, match="give --calibration-data"):
                convert_layer(case.layer, config=config, rank=9)
        with pytest.raises(ValueError, match="rank 60 of a latent"):
            convert_layer(case.layer, config=GOOD, rank=60, statistics=statistics)


def test_latent_attention_is_refused():
    latent = Latent(query_rank=0, kv_rank=8, plain_size=8, rotary_size=4, value_size=8)
    shape: Architecture = architecture("gqa", latent=latent)
    assert "latent attention already" in conversion_problems(GOOD, shape)[0]


@pytest.mark.parametrize("method", get_args(LowRankMethod))
def test_presets_set_options(method):
    names = {f.name for f in fields(MLAConfig)}
    options = preset_options(method)
    assert set(options) <= names
    config = preset(method, rope_pairs=2, cache_ratio=0.75)
    assert config.low_rank_method == method
    assert conversion_problems(config, architecture("gqa")) == []
    is_of_weights = method.startswith("paper")
    plain = replace(config, rope_strategy="high")
    assert plain.needs_statistics is not is_of_weights
    assert plain.needs_inputs is (method == "best")
    assert config.needs_statistics and config.is_compensated and not plain.is_compensated
