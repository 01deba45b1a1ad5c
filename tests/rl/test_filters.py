"""Which episodes are trained and the counts of why not; penalties that shape rewards."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.rl.filters import select_episodes
from megatron_ext.rl.reward_shaping import episode_kl, overlong_penalty
from tests.rl import naive
from tests.rl.test_advantages import episodes, outcomes


@settings(max_examples=40, deadline=None)
@given(outcomes(), st.data())
def test_every_episode_is_trained_or_counted_under_one_reason(outcome, data):
    rewards, groups, valid, tokens = outcome
    n = len(rewards)
    truncated = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    masks, drops = data.draw(st.booleans()), data.draw(st.booleans())
    found = select_episodes(
        episodes(rewards, groups=groups, valid=valid, truncated=truncated, tokens=tokens),
        overlong_episodes="mask" if masks else "train",
        zero_variance_groups="drop" if drops else "train",
    )

    def is_flat(i):
        own = [rewards[j] for j in range(n) if groups[j] == groups[i] and valid[j]]
        return naive.equal_up_to_rounding(own)

    reasons = [
        "invalid"
        if not valid[i]
        else "zero_variance_dropped"
        if drops and is_flat(i)
        else "overlong_masked"
        if masks and truncated[i]
        else "trained"
        for i in range(n)
    ]
    assert found.is_trained_E.tolist() == [r == "trained" for r in reasons]
    for reason in ("invalid", "zero_variance_dropped", "overlong_masked", "trained"):
        assert found.counts[reason] == reasons.count(reason)
    assert found.counts["episodes"] == n
    assert found.counts["groups"] == len(set(groups))
    flat = {groups[i] for i in range(n) if valid[i] and is_flat(i)}
    assert found.counts["zero_variance_groups"] == len(flat)
    assert found.counts["truncated"] == sum(truncated)


@pytest.mark.parametrize("rewards", [[0.7] * 7, [0.3] * 6, [0.1] * 8])
def test_c1_a_constant_group_is_counted(rewards):
    group = episodes(rewards, dtype=torch.float32)
    found = select_episodes(group, overlong_episodes="train", zero_variance_groups="drop")
    assert found.counts["zero_variance_groups"] == 1
    assert found.counts["zero_variance_dropped"] == len(rewards)
    assert found.counts["trained"] == 0


def test_c9_soft_overlong_penalty():
    found = overlong_penalty(torch.tensor([16, 17, 18, 20, 21]), max_length=20, window=4)
    assert found.tolist() == [0, -0.25, -0.5, -1, -1]


def test_a_window_that_does_not_fit_is_refused():
    for window in (0, 21):
        with pytest.raises(ValueError, match=f"--overlong-penalty-window {window} must"):
            overlong_penalty(torch.tensor([16]), max_length=20, window=window)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-90, 0), st.floats(-90, 0), st.booleans()), max_size=6),
    st.sampled_from(["k1", "k2", "k3"]),
)
def test_kl_of_an_episode_is_the_sum_over_its_trained_tokens(tokens, estimator):
    def column(k):
        return torch.tensor([t[k] if t[2] else math.nan for t in tokens])

    found = episode_kl(
        column(0), column(1), mask_n=torch.tensor([t[2] for t in tokens]), estimator=estimator
    )
    # the log-probs above are stored in float32
    kept = [(float(a), float(b)) for a, b in zip(column(0), column(1), strict=True) if a == a]
    want = sum(naive.kl(a, b, estimator)[0] for a, b in kept)
    assert float(found) == pytest.approx(want, rel=1e-9, abs=1e-9)
