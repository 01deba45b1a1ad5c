"""pass@k against enumeration, intervals against known values and their coverage."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.evaluation.pass_rates import (
    bootstrap_interval,
    pass_at_k,
    wilson_interval,
)


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(counts, data):
    samples, passed = counts
    k = data.draw(st.integers(1, samples))
    subsets = list(combinations(range(samples), k))
    share = sum(any(i < passed for i in subset) for subset in subsets) / len(subsets)
    assert pass_at_k(samples=samples, passed=passed, k=k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_of_many_samples_does_not_overflow():
    assert pass_at_k(samples=10_000, passed=1, k=100) == pytest.approx(0.01)


@pytest.mark.parametrize(("samples", "passed", "k"), [(4, 1, 5), (4, 5, 1), (4, 1, 0), (0, 0, 1)])
def test_impossible_counts_are_refused(samples, passed, k):
    with pytest.raises(ValueError, match=f"pass@{k} of {samples} samples with {passed} passed"):
        pass_at_k(samples=samples, passed=passed, k=k)


@pytest.mark.parametrize(
    ("passed", "draws", "low", "high"),
    [  # Newcombe 1998, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (20, 20, 0.8389, 1.0),
    ],
)
def test_wilson_is_the_published_interval(passed, draws, low, high):
    rate = wilson_interval(passed / draws, draws=draws)
    assert (rate.value, round(rate.low, 4), round(rate.high, 4)) == (passed / draws, low, high)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_contains_the_rate_and_stays_in_range(counts):
    passed, draws = counts
    rate = wilson_interval(passed / draws, draws=draws)
    assert 0 <= rate.low <= rate.value <= rate.high <= 1


def test_bootstrap_covers_the_true_mean_and_narrows_with_the_root_of_the_number():
    generator = torch.Generator().manual_seed(0)
    covered, trials = 0, 40
    for trial in range(trials):
        values = torch.rand(200, generator=generator, dtype=torch.float64).tolist()
        rate = bootstrap_interval(values, seed=trial)
        covered += rate.low <= 0.5 <= rate.high
        assert rate.high - rate.low == pytest.approx(2 * 1.96 * (1 / 12 / 200) ** 0.5, rel=0.25)
    assert covered >= 33  # 38 expected, 3.6 standard deviations


def test_bootstrap_is_the_same_for_the_same_seed():
    values = [0.0, 1.0, 0.5, 0.25]
    assert bootstrap_interval(values) == bootstrap_interval(values)
    constant = bootstrap_interval([1.0] * 5)
    assert (constant.low, constant.value, constant.high) == (1, 1, 1)
    assert str(constant) == "1.000 [1.000, 1.000]"


def test_nothing_has_no_interval():
    with pytest.raises(ValueError, match="there must be a task"):
        bootstrap_interval([])
    with pytest.raises(ValueError, match="there must be a task"):
        wilson_interval(0.5, draws=0)
