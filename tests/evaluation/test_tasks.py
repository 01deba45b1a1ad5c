"""Evaluation of episodes: who is asked how often, and what counts."""

from __future__ import annotations

import json

import pytest

from megatron_ext.environments.arithmetic import MAX_CONTEXT, ArithmeticSource
from megatron_ext.environments.base import EpisodeLimits
from megatron_ext.environments.episode import EpisodeBuilder
from megatron_ext.environments.runner import EpisodeRunner
from megatron_ext.evaluation.pass_rates import bootstrap_interval, pass_at_k, wilson_interval
from megatron_ext.evaluation.tasks import evaluation_starts, summarize
from tests.environments.scripted import ScriptedGenerator


def episode(group, reward, *, end="done", family="easy"):
    builder = EpisodeBuilder([1, 2])
    builder.append_sampled([3, 4, 5])
    return builder.finish(
        task_id=f"task {group}",
        group=group,
        reward=reward,
        end_reason=end,
        error="broken" if end == "failed" else None,
        metadata={"family": family, "level": group},
    )


def of_counts(*counts, samples=4):
    """Episodes of one task for each count of passes."""
    return [
        episode(group, float(sample < passed))
        for group, passed in enumerate(counts)
        for sample in range(samples)
    ]


def test_rates_are_those_of_the_tasks():
    result = summarize(of_counts(4, 2, 0), ks=(1, 2, 4))
    for k in (2, 4):
        values = [pass_at_k(samples=4, passed=passed, k=k) for passed in (4, 2, 0)]
        assert result.pass_at[k] == bootstrap_interval(values)
    assert result.pass_at[1] == wilson_interval(0.5, draws=3)
    assert (result.num_tasks, result.num_episodes, result.num_sampled) == (3, 12, 36)
    assert result.mean_reward == 0.5


@pytest.mark.parametrize("passed", [0, 4])
def test_tasks_that_all_end_alike_leave_a_doubt(passed):
    result = summarize(of_counts(passed, passed, passed), ks=(1, 2))
    assert result.pass_at[2] == result.pass_at[1] == wilson_interval(passed / 4, draws=3)
    assert result.pass_at[2].high - result.pass_at[2].low > 0.5


def test_the_record_is_json_with_everything():
    record = json.loads(json.dumps(summarize(of_counts(4, 0), ks=(1, 2)).as_record()))
    assert record["pass_at"]["1"] == vars(wilson_interval(0.5, draws=2))
    assert record["groups"]["family=easy"]["value"] == 0.5 and record["num_tasks"] == 2


def test_failed_episodes_are_counted_and_belong_to_no_rate():
    result = summarize(
        [episode(0, 1.0), episode(0, 0.0, end="failed"), episode(1, 0.0, end="length")]
    )
    assert result.pass_at[1] == wilson_interval(0.5, draws=2)
    assert (result.num_failed, result.num_truncated) == (1, 1)
    metrics = result.metrics()
    assert metrics["eval_pass_at_1"] == 0.5 and metrics["eval_truncated_share"] == 0.5
    assert metrics["eval_pass_at_1_low"] < 0.5 < metrics["eval_pass_at_1_high"]


def test_partial_rewards_do_not_pass():
    episodes = [episode(0, 0.999), episode(1, 1 - 1e-7), episode(2, 2.0)]
    assert summarize(episodes).pass_at[1].value == pytest.approx(2 / 3)
    assert summarize(episodes, passing_reward=0.5).pass_at[1].value == 1


def test_rates_by_metadata():
    episodes = [episode(0, 1.0), episode(1, 0.0, family="hard"), episode(2, 1.0, family="hard")]
    groups = summarize(episodes, group_by=("family", "level", "missing")).groups
    assert {name: rate.value for name, rate in groups.items()} == {
        "family=easy": 1,
        "family=hard": 0.5,
        "level=0": 1,
        "level=1": 0,
        "level=2": 1,
    }


@pytest.mark.parametrize(
    ("episodes", "ks", "problem"),
    [
        ([], (1,), "the list of tasks is empty"),
        ([episode(0, 0.0, end="failed")], (1,), "all 1 episodes failed, .* broken"),
        (of_counts(1, samples=2), (3,), "pass@3 needs 3 valid episodes .* no task has more than 2"),
    ],
)
def test_what_cannot_be_rated_is_an_error(episodes, ks, problem):
    with pytest.raises(ValueError, match=problem):
        summarize(episodes, ks=ks)


def test_every_task_is_asked_equally_often_and_differently():
    tasks = ArithmeticSource().held_out(40)
    starts = evaluation_starts(tasks, samples=2, seed=0)
    assert len(starts) == 80 and len({(s.seed, s.sample) for s in starts}) == 80
    assert all(a.seed == b.seed for a, b in zip(starts[::2], starts[1::2], strict=True))
    assert starts == evaluation_starts(tasks, samples=2, seed=0)
    assert not {s.seed for s in evaluation_starts(tasks, samples=2, seed=1)} & {
        s.seed for s in starts
    }
    source = ArithmeticSource()
    runner = EpisodeRunner(
        source.environment,
        limits=EpisodeLimits(max_new_tokens=MAX_CONTEXT, max_context=MAX_CONTEXT),
    )
    result = summarize(runner.run(ScriptedGenerator(), starts), ks=(1, 2))
    assert {rate.value for rate in [*result.pass_at.values(), *result.groups.values()]} == {1.0}
    with pytest.raises(ValueError, match="0 samples of each task show nothing"):
        evaluation_starts(tasks, samples=0, seed=0)
