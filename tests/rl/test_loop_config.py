"""Sizes of a run that do not fit together are refused with the remedy."""

import pytest

from megatron_ext.rl.loop_config import LoopConfig


def test_defaults_fit():
    assert LoopConfig().problems(global_batch_size=128) == []
    assert LoopConfig().problems(global_batch_size=None) == []


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"group_size": 5}, "Use 10 or 15"),
        ({"group_size": 20}, "Use 20 or 20"),
        ({"group_size": 4, "minibatches": 13}, "--minibatches 13 is more than"),
    ],
)
def test_what_does_not_fit_is_named(values, named):
    found = LoopConfig(**values).problems(global_batch_size=12)
    assert len(found) == 1
    assert named in found[0]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"group_size": 0}, "--group-size 0 must be at least 1"),
        ({"minibatches": -1}, "--minibatches -1"),
        ({"rollouts_megabytes": float("nan")}, "--rollouts-megabytes nan"),
    ],
)
def test_a_number_out_of_range_is_refused(values, named):
    with pytest.raises(ValueError, match=named):
        LoopConfig(**values)


def test_updates_of_a_batch():
    assert LoopConfig(batch_epochs=3, minibatches=4).updates_per_batch == 12
