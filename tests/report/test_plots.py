"""Every metric has one plot, and a plot is an SVG element that fits into any page."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from megatron_ext.report.history import Envelope, History, envelope
from megatron_ext.report.plots import draw_svgs, group_metrics


def svg_of(*curves: list[float]) -> str:
    (svg,) = draw_svgs([[curve_of(values) for values in curves]], steps=(1, 3))
    return svg


def curve_of(values: list[float]) -> Envelope:
    history = History()
    for step, value in enumerate(values, start=1):
        history.add(step, {"loss": value})
    return envelope(history.series["loss"], max_points=50)


def test_every_metric_is_in_one_plot_and_the_known_ones_come_first():
    names = ["kl", "lr", "reserved_memory_bytes", "eval_loss", "loss", "grad_norm", "value_loss"]
    names += ["peak_memory_bytes", "tokens_per_second"]

    groups = group_metrics(names)

    assert [group.names for group in groups] == [
        ("eval_loss", "loss"),
        ("grad_norm",),
        ("lr",),
        ("tokens_per_second",),
        ("reserved_memory_bytes", "peak_memory_bytes"),
        ("kl",),
        ("value_loss",),
    ]
    assert sorted(name for group in groups for name in group.names) == sorted(names)


@pytest.mark.parametrize(
    "values",
    [[-0.5], [math.nan, math.inf], [1.0, math.nan, -1.0], [-3e9] * 3, [1e-30, -1e-30], [0.1] * 400],
    ids=["one point", "no point", "gap", "constant", "tiny", "long"],
)
def test_a_plot_is_a_well_formed_element(values):
    root = ElementTree.fromstring(svg_of(values))
    assert root.tag.endswith("svg")
    assert "viewBox" in root.attrib
    assert "width" not in root.attrib


def test_numbers_of_reinforcement_share_plots_and_the_rewards_come_first():
    names = ["loss", "reward_mean", "train_seconds", "pass_rate", "eval_pass_rate_sampled"]
    names += ["rollout_seconds", "clip_fraction_low", "eval_pass_rate", "clip_fraction_high"]

    groups = group_metrics(names)

    assert [group.names for group in groups] == [
        ("eval_pass_rate_sampled", "eval_pass_rate"),
        ("reward_mean", "pass_rate"),
        ("loss",),
        ("clip_fraction_low", "clip_fraction_high"),
        ("train_seconds", "rollout_seconds"),
    ]


def test_colours_are_the_pages():
    svg = svg_of([1.0, 2.0], [2.0, 1.0], [0.0, math.nan])
    assert "#0" not in svg  # no colour stand-in is left
    for colour in ("currentColor", "var(--grid)", "var(--series-0)", "var(--series-2)"):
        assert colour in svg


def test_ids_of_two_plots_do_not_meet():
    svgs = draw_svgs([[curve_of([1.0])], [curve_of([1.0])]], steps=(1, 3))
    first, second = (set(re.findall(r'\bid="([^"]+)"', svg)) for svg in svgs)
    assert first
    assert not first & second


def test_a_plot_shows_nothing_of_the_one_before():
    plots = [[curve_of([1e6, -1e6]), curve_of([0.1] * 400)], [curve_of([1.0, 2.0])]]
    after_another = draw_svgs(plots, steps=(1, 3))[1]
    alone = draw_svgs(plots[1:], steps=(1, 3))[0]
    ids = r"\b[mp][0-9a-f]{10}\b"  # drawn anew for each element
    assert re.sub(ids, "", after_another) == re.sub(ids, "", alone)
