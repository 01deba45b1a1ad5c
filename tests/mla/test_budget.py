"""The division of a cache between rotary pairs and latent is the one with the least error."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_ext.mla.budget import best_division
from megatron_ext.mla.presets import preset
from megatron_ext.mla.sizes import converted_cache, divisions, latent_rank
from megatron_ext.weights.architecture import Rope
from tests.mla.cases import Case
from tests.mla.reference import architecture


def test_divisions_fill_the_cache_and_leave_a_latent():
    shape = architecture("gqa", head_size=64, hidden_size=256, rope=Rope(rotated_share=0.5))
    config = preset("best", cache_ratio=0.5)
    found = divisions(config, shape)
    assert [c.rope_pairs for c in found] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16]
    for choice in found:
        assert converted_cache(choice, shape).total == 128
        assert latent_rank(choice, shape) == 128 - 4 * choice.rope_pairs
    shared = divisions(replace(config, mla_layout="deepseek"), shape)
    assert {c.rope_stride for c in shared} == {1, 2}
    assert max(c.rope_pairs for c in shared if c.rope_stride == 2) == 8
    fixed = divisions(replace(config, mla_layout="deepseek", rope_pairs=4, kv_rank=9), shape)
    assert [(c.rope_pairs, c.rope_stride) for c in fixed] == [(4, 1), (4, 2)]


@pytest.mark.parametrize("layout", ["paper", "deepseek"])
def test_the_best_is_the_least(layout):
    cases = [Case("gqa"), Case("biased")]
    config = preset("best", mla_layout=layout, cache_ratio=0.6)
    layers = [(case.layer, case.statistics()) for case in cases]
    best, losses = best_division(layers, config=config, architecture=cases[0].shape)
    assert losses[best.rope_pairs, best.rope_stride] == min(losses.values())
    assert len(losses) == len(divisions(config, cases[0].shape)) > 3
    case = cases[0]
    layer = case.convert(best, rank=latent_rank(best, case.shape))
    assert layer.num_pairs == best.rope_pairs


def test_what_cannot_be_divided_is_refused():
    case = Case("gqa")
    layers = [(case.layer, case.statistics())]
    with pytest.raises(ValueError, match=r"--cache-ratio 0.01 leaves no latent"):
        config = preset("best", cache_ratio=0.01)
        best_division(layers, config=config, architecture=case.shape)
    with pytest.raises(ValueError, match=r"have none\. Calibrate with --calibration-kept 1"):
        none = [(case.layer, replace(case.statistics(), inputs_STD=case.x_TD[None][:0]))]
        best_division(none, config=preset("best", cache_ratio=0.5), architecture=case.shape)
    with pytest.raises(ValueError, match=r"are not known"):
        case.convert(preset("best", mla_layout="deepseek"), rank=4)
