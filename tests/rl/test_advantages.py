"""Advantages of groups and whitening, against plain Python, and the C values of CASES.md."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.rl.advantages import advantages, group_statistics, whiten
from megatron_ext.rl.types import Episodes
from tests.rl import naive

NAN = float("nan")


def episodes(rewards, *, groups=None, valid=None, truncated=None, tokens=None, dtype=torch.float64):
    n = len(rewards)
    return Episodes(
        rewards_E=torch.tensor(rewards, dtype=dtype),
        groups_E=torch.tensor([0] * n if groups is None else groups, dtype=torch.int64),
        is_valid_E=torch.tensor([True] * n if valid is None else valid, dtype=torch.bool),
        is_truncated_E=torch.tensor(
            [False] * n if truncated is None else truncated, dtype=torch.bool
        ),
        num_tokens_E=torch.tensor([1] * n if tokens is None else tokens, dtype=torch.int64),
    )


def advantages_of(found, *, baseline="group-mean", normalization="none", trained=None, group=None):
    trained = found.is_valid_E if trained is None else torch.tensor(trained)
    return advantages(
        found,
        is_trained_E=trained,
        baseline=baseline,
        normalization=normalization,
        data_group=group,
    ).tolist()


@st.composite
def outcomes(draw):
    """Rewards (NaN where invalid), groups, validity and token numbers of some episodes."""
    rewards = draw(st.lists(st.sampled_from([0.0, 0.1, 0.7, 1.0, -3.5]), max_size=12))
    n = len(rewards)
    groups = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    valid = draw(st.lists(st.sampled_from([True, True, False]), min_size=n, max_size=n))
    tokens = draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
    return [r if ok else NAN for r, ok in zip(rewards, valid, strict=True)], groups, valid, tokens


@settings(max_examples=40, deadline=None)
@given(
    outcomes(),
    st.sampled_from(
        [
            ("none", "none"),
            ("group-mean", "none"),
            ("group-mean", "group-std"),
            ("leave-one-out", "none"),
        ]
    ),
)
def test_group_advantages_equal_plain_python(outcome, choice):
    rewards, groups, valid, tokens = outcome
    baseline, normalization = choice
    found = advantages_of(
        episodes(rewards, groups=groups, valid=valid, tokens=tokens),
        baseline=baseline,
        normalization=normalization,
    )
    want = naive.group_advantages(
        rewards, groups, valid, baseline=baseline, by_std=normalization == "group-std"
    )
    assert found == pytest.approx(want, rel=1e-6, abs=1e-7)  # float32
    assert [f == 0 for f in found] == [w == 0 for w in want]


@settings(max_examples=40, deadline=None)
@given(outcomes())
def test_batch_normalization_equals_plain_python(outcome):
    rewards, groups, valid, tokens = outcome
    found = advantages_of(
        episodes(rewards, groups=groups, valid=valid, tokens=tokens),
        baseline="none",
        normalization="batch",
    )
    weights = [n if ok else 0 for n, ok in zip(tokens, valid, strict=True)]
    assert found == pytest.approx(naive.whitened(rewards, weights), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("normalization", ["none", "group-std"])
@pytest.mark.parametrize("baseline", ["group-mean", "leave-one-out"])
@pytest.mark.parametrize("rewards", [[0.7] * 7, [0.3] * 6, [0.1] * 8, [0.1 + 0.2, 0.3, 0.3]])
def test_c1_a_constant_group_has_advantages_of_exactly_0(rewards, baseline, normalization):
    for dtype in (torch.float32, torch.float64):
        group = episodes(rewards, dtype=dtype)
        assert group_statistics(group).is_constant_E.all()
        found = advantages_of(group, baseline=baseline, normalization=normalization)
        assert found == [0.0] * len(rewards)


def test_a_small_but_real_difference_is_not_rounding():
    found = advantages_of(episodes([1.0, 1.0, 1.001]), normalization="group-std")
    assert found == pytest.approx([-0.57735, -0.57735, 1.154701], abs=1e-6)


def test_masked_episodes_stay_in_the_baseline_and_invalid_ones_do_not():
    group = episodes([1.0, 0.0, 0.5, NAN], valid=[True, True, True, False])
    found = advantages_of(group, trained=[True, True, False, False])
    assert found == [0.5, -0.5, 0.0, 0.0]
    found = advantages_of(group, trained=[True, True, False, False], baseline="leave-one-out")
    assert found == [0.75, -0.75, 0.0, 0.0]


def test_c5_whitening_by_hand():
    found = whiten(torch.tensor([1.0, 1, -1, -1, 3, 1]), weights=torch.ones(6)).tolist()
    want = [0.2425, 0.2425, -1.2127, -1.2127, 1.6977, 0.2425]
    assert found == pytest.approx(want, abs=5e-5)


def test_whitening_of_equal_values_is_exactly_0():
    assert whiten(torch.full((7,), 0.7), weights=torch.ones(7)).tolist() == [0.0] * 7
    assert whiten(torch.tensor([NAN, NAN]), weights=torch.zeros(2)).tolist() == [0.0, 0.0]
    assert whiten(torch.zeros(0), weights=torch.zeros(0)).tolist() == []


def whiten_own_part(parts: list[list[float]]) -> list[float]:
    values = torch.tensor(parts[dist.get_rank()])
    return whiten(values, weights=torch.ones(len(values)), group=dist.group.WORLD).tolist()


def advantages_of_own_part(parts: list[list[float]]) -> list[float]:
    return advantages_of(
        episodes(parts[dist.get_rank()]),
        baseline="none",
        normalization="batch",
        group=dist.group.WORLD,
    )


def test_c5_whitening_is_over_all_ranks(ranks):
    found = ranks(2).run(whiten_own_part, [[1.0, 1.0, -1.0], [-1.0, 3.0, 1.0]])
    assert found[0] == pytest.approx([0.2425, 0.2425, -1.2127], abs=5e-5)
    assert found[1] == pytest.approx([-1.2127, 1.6977, 0.2425], abs=5e-5)


def test_a_rank_without_episodes_joins_and_equal_rewards_on_all_ranks_give_0(ranks):
    assert ranks(2).run(advantages_of_own_part, [[1.0, -1.0], []]) == [[1.0, -1.0], []]
    assert ranks(2).run(advantages_of_own_part, [[0.7] * 3, [0.7]]) == [[0.0] * 3, [0.0]]


def test_bad_columns_and_rewards_are_refused():
    with pytest.raises(ValueError, match=r"groups_E \[1\] must be \[E\].*rewards_E \[2\]"):
        episodes([1.0, 2.0], groups=[0])
    with pytest.raises(ValueError, match=r"rewards of episodes \[1\] are not finite"):
        episodes([1.0, NAN])
