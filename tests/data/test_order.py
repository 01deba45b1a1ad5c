"""The order of samples: a function of seed and position, each epoch a permutation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.data.order import SampleOrder


@given(st.integers(1, 40), st.integers(0, 2**31), st.integers(0, 5))
def test_an_epoch_has_every_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    order = SampleOrder(num_samples=num_samples, seed=seed)
    assert sorted(order.take(epoch * num_samples, num_samples)) == list(range(num_samples))


@given(st.integers(1, 20), st.lists(st.integers(1, 9), max_size=8))
def test_a_resumed_run_goes_on(num_samples: int, batches: list[int]) -> None:
    """Whatever the batch sizes, and wherever a new object takes over."""
    resumed, position = [], 0
    for count in batches:
        resumed += SampleOrder(num_samples=num_samples, seed=3).take(position, count)
        position += count
    assert resumed == SampleOrder(num_samples=num_samples, seed=3).take(0, sum(batches))


def test_epochs_and_seeds_differ() -> None:
    order = SampleOrder(num_samples=50, seed=1)
    assert order.take(0, 50) != order.take(50, 50)
    assert order.take(0, 50) != SampleOrder(num_samples=50, seed=2).take(0, 50)
    assert order.take(0, 50) == SampleOrder(num_samples=50, seed=1).take(0, 50)


def test_no_samples() -> None:
    with pytest.raises(ValueError, match="no sample to train on"):
        SampleOrder(num_samples=0, seed=1)
