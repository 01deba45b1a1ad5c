"""The built-in tasks: split, shares of the families, lengths, and what demonstrations show."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from megatron_ext.environments.arithmetic import ArithmeticSource
from megatron_ext.environments.arithmetic_demonstrations import (
    CARELESS_SHARE,
    demonstrate,
    draw_demonstration,
)
from megatron_ext.environments.arithmetic_tasks import (
    DEMONSTRATION_MIX,
    TASK_MIX,
    TOKENIZER,
    ArithmeticTasks,
    draw_of_family,
    draw_task,
)
from megatron_ext.environments.split import is_held_out

FAMILIES = ("digits", "single", "chain")
TRAINED = [ArithmeticTasks(seed=1).train(position) for position in range(4000)]
HELD_OUT = ArithmeticTasks().held_out(600)


@pytest.mark.parametrize("side", [False, True], ids=["train", "held out"])
def test_each_family_has_its_share_on_both_sides(side):
    rng = random.Random(3)
    families = Counter(draw_task(rng, held_out=side).family for _ in range(4000))
    for family, share in TASK_MIX.items():
        assert abs(families[family] / 4000 - share) < 0.03  # 4 standard deviations


@pytest.mark.parametrize("family", FAMILIES)
def test_one_task_in_five_of_each_family_is_held_out(family):
    rng = random.Random(4)
    expressions = {draw_of_family(rng, family).expression for _ in range(6000)}
    share = sum(map(is_held_out, expressions)) / len(expressions)
    assert abs(share - 0.2) < 0.04


def test_no_held_out_task_is_trained():
    assert not {task.id for task in TRAINED} & {task.id for task in HELD_OUT}
    assert len({task.id for task in HELD_OUT}) == 600
    assert {task.family for task in HELD_OUT} == set(FAMILIES)


def test_tasks_are_a_function_of_seed_and_position():
    again = ArithmeticSource(seed=1)
    assert [again.train(position) for position in (7, 3, 7)] == [TRAINED[i] for i in (7, 3, 7)]
    assert ArithmeticTasks(seed=2).train(7) != TRAINED[7]
    assert ArithmeticTasks(seed=2).held_out(50) == HELD_OUT[:50]


def test_a_family_without_more_held_out_tasks_leaves_its_place_to_chains():
    many = Counter(task.family for task in ArithmeticTasks(mix={"digits": 1.0}).held_out(400))
    assert many["digits"] + many["chain"] == 400 and 200 < many["digits"] < 300


def test_what_the_families_look_like():
    for task in TRAINED:
        value = task.start
        assert task.answer >= 0 and len(set(task.operations)) == len(task.operations)
        for operator, operand in task.operations:
            value = eval(f"{value}{operator}{operand}")
            assert 0 <= value < 1000
        assert task.level == (0 if task.family == "digits" else len(task.operations))
        assert task.metadata == {"family": task.family, "level": task.level}
    levels = Counter(task.level for task in TRAINED)
    assert set(levels) == set(range(14))
    chains = [levels[level] for level in range(2, 12)]
    assert chains[0] > chains[4] > chains[9]


def test_an_expert_is_always_right_and_its_episodes_have_a_long_tail():
    """Issue: from about 10 to 150 tokens, median near 18, 90th percentile near 80."""
    episodes = [demonstrate(task) for task in TRAINED]
    assert {episode.reward for episode in episodes} == {1.0}
    lengths = sorted(len(episode.ids) for episode in episodes)
    assert lengths[0] in (9, 10) and 140 <= lengths[-1] <= 155
    assert 17 <= lengths[len(lengths) // 2] <= 22
    assert 70 <= lengths[len(lengths) * 9 // 10] <= 90


def test_demonstrations_show_both_ways():
    rng = random.Random(5)
    episodes = [draw_demonstration(rng) for _ in range(4000)]
    families = Counter(episode.metadata["family"] for episode in episodes)
    for family, share in DEMONSTRATION_MIX.items():
        assert abs(families[family] / 4000 - share) < 0.03
    assert not any(is_held_out(episode.task_id) for episode in episodes)
    of_digits = [e for e in episodes if e.metadata["family"] == "digits"]
    assert {(e.reward, e.num_turns) for e in of_digits} == {(1.0, 1)}
    others = [e for e in episodes if e.metadata["family"] != "digits"]
    careless = [e for e in others if e.num_turns == 1]
    assert abs(len(careless) / len(others) - CARELESS_SHARE) < 0.03
    assert {e.reward for e in others if e.num_turns > 1} == {1.0}
    right = sum(e.reward for e in careless) / len(careless)
    assert 0.08 < right < 0.2  # one in nine, a little more where 0 cuts the range


def test_only_what_was_demonstrated_is_trained():
    rng = random.Random(6)
    episode = next(e for e in iter(lambda: draw_demonstration(rng), None) if e.num_turns > 2)
    said = [TOKENIZER.decode(span.ids) for span in episode.spans() if span.role == "policy"]
    assert all(text[-1] in ";." and "=" not in text for text in said)
    given = [TOKENIZER.decode(span.ids) for span in episode.spans() if span.role == "environment"]
    assert all(text[0] == "=" for text in given)
