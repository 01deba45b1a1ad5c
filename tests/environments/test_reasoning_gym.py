"""Data sets of reasoning-gym: tasks by position, the split, their scorers."""

from __future__ import annotations

import sys

import pytest

from megatron_ext.environments.characters import CharacterTokenizer
from megatron_ext.environments.reasoning_gym import ReasoningGymSource
from megatron_ext.environments.split import is_held_out
from megatron_ext.environments.text import CharacterCodec

LETTERS = "".join(map(chr, [10, *range(32, 127), 215]))
TOKENS = CharacterTokenizer(LETTERS, pad="~")
CODEC = CharacterCodec(TOKENS, stop="~")


def source(name="chain_sum", **options):
    pytest.importorskip("reasoning_gym")
    return ReasoningGymSource(name, codec=CODEC, as_chat=False, seed=3, **options)


def test_tasks_are_a_function_of_the_position_and_split_by_their_text():
    tasks = source()
    trained = [tasks.train(position) for position in range(60)]
    assert tasks.train(7) == trained[7] == source().train(10_007)
    assert not any(is_held_out(task.question) for task in trained)
    held_out = tasks.held_out(20)
    assert len({task.question for task in held_out}) == 20
    assert all(is_held_out(task.question) for task in held_out)
    assert trained[0].metadata == {"family": "chain_sum"}


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("I think <answer>{}</answer>", 1),
        ("<answer>x</answer> no, <answer> {} </answer>", 1),
        ("<answer>{}</answer> no, <answer>x</answer>", 0),
        ("{}", 0),
        ("<answer>{}", 0),
        ("<answer></answer>", 0),
    ],
)
def test_the_scorer_sees_the_last_answer(response, reward):
    tasks = source()
    task = tasks.train(0)
    environment = tasks.environment()
    prompt = TOKENS.decode(environment.reset(task))
    assert prompt.endswith(f"{task.question}\n\n") and "<answer>" in prompt
    said = TOKENS.encode(response.format(task.entry["answer"]) + "~")
    observation = environment.step(said)
    assert observation.done and abs(observation.reward - reward) < 0.02  # some pay for the form


def test_a_scorer_that_raises_costs_the_answer_only():
    tasks = source("prime_factorization")
    environment = tasks.environment()
    environment.reset(tasks.train(0))
    observation = environment.step(TOKENS.encode("<answer>two</answer>~"))
    assert observation.reward == 0
    assert observation.warning is not None
    assert observation.warning.startswith("the scorer raised ValueError: invalid literal")


def test_a_chat_has_the_instruction_first():
    pytest.importorskip("reasoning_gym")
    task = ReasoningGymSource("chain_sum", codec=CODEC, seed=3).train(0)
    assert [message["role"] for message in task.prompt] == ["system", "user"]


def test_options_of_the_data_set():
    task = source(options={"min_terms": 2, "max_terms": 2, "max_digits": 1}).train(0)
    first, operator, second = task.question.split(":")[1].rstrip(" =").split()
    assert operator in "+-" and len(first) == len(second) == 1
    with pytest.raises(ValueError, match=r"reasoning-gym:chain_sum: .*nonsense"):
        source(options={"nonsense": 1})


def test_an_unknown_name_gets_the_close_ones():
    with pytest.raises(ValueError, match=r"no such data set\. Of 106, try chain_sum"):
        source("chain_sums")


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match="pip install reasoning-gym"):
        ReasoningGymSource("chain_sum", codec=CODEC)
