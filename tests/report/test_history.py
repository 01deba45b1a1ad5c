"""An envelope loses no extreme, and summaries equal what a plain loop finds."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.report.history import History, Series, envelope, summarise


def series_of(values: list[float], *, first_step: int = 1) -> Series:
    history = History()
    for step, value in enumerate(values, start=first_step):
        history.add(step, {"loss": value})
    return history.series["loss"]


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.floats(-1e300, 1e300) | st.just(math.nan), min_size=1, max_size=60))
def test_an_envelope_keeps_the_extremes_in_few_points(values):
    curve = envelope(series_of(values), max_points=7)

    is_point = ~np.isnan(curve.mean)
    finite = [value for value in values if math.isfinite(value)]
    assert len(curve.steps) == min(len(values), 7)
    assert (np.diff(curve.steps) > 0).all()
    assert (curve.low[is_point] <= curve.mean[is_point]).all()
    assert (curve.mean[is_point] <= curve.high[is_point]).all()
    if finite:
        assert np.nanmin(curve.low) == min(finite)
        assert np.nanmax(curve.high) == max(finite)
    else:
        assert not is_point.any()


def test_a_short_series_is_its_own_envelope_with_gaps():
    curve = envelope(series_of([-1.0, math.nan, 2.0, math.inf]), max_points=4)
    assert curve.is_exact
    assert curve.steps.tolist() == [1, 2, 3, 4]
    for values in (curve.low, curve.mean, curve.high):
        np.testing.assert_array_equal(values, [-1.0, np.nan, 2.0, np.nan])


def test_the_mean_of_a_long_series_is_that_of_its_stretches():
    values = np.sin(np.arange(1000.0)).tolist()
    curve = envelope(series_of(values), max_points=100)
    want = np.asarray(values).reshape(100, 10).mean(axis=1)
    np.testing.assert_allclose(curve.mean, want, rtol=0, atol=1e-15)  # ten addends below 1


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.floats(), min_size=1, max_size=20))
def test_a_summary_equals_the_plain_loop(values):
    summary = summarise(series_of(values, first_step=5))

    finite = [(value, step) for step, value in enumerate(values, start=5) if math.isfinite(value)]
    broken = [step for step, value in enumerate(values, start=5) if not math.isfinite(value)]
    assert repr(summary.first) == repr(values[0])
    assert repr(summary.last) == repr(values[-1])
    assert summary.lowest == (min(finite, default=None, key=lambda point: point[0]))
    assert summary.highest == (max(finite, default=None, key=lambda point: point[0]))
    assert summary.num_nonfinite == len(broken)
    assert summary.first_nonfinite_step == (broken[0] if broken else None)


def test_metrics_may_come_late_and_leave_gaps():
    history = History()
    history.add(1, {"loss": -1})
    history.add(2, {"loss": -2, "accuracy": 0.5})
    history.add(4, {"accuracy": 0.75})
    assert (history.first_step, history.last_step) == (1, 4)
    assert list(history.series) == ["loss", "accuracy"]
    assert list(history.series["loss"].steps) == [1, 2]
    assert list(history.series["accuracy"].steps) == [2, 4]
