"""The calculator and its reward, against Python's own arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.environments.arithmetic import (
    LARGEST_NUMBER,
    MAX_CALLS,
    MAX_CONTEXT,
    ArithmeticEnvironment,
)
from megatron_ext.environments.arithmetic_demonstrations import demonstrate
from megatron_ext.environments.arithmetic_tasks import (
    LETTERS,
    LONGEST_CHAIN,
    TOKENIZER,
    ArithmeticTask,
)

TASK = ArithmeticTask(family="chain", start=12, operations=(("+", 7), ("-", 5)))
OPERATIONS = st.lists(
    st.tuples(st.sampled_from("+-*"), st.integers(0, 99)), min_size=1, max_size=len(LETTERS)
)


def talk(environment, *turns):
    """The environment's answers to turns, as text, and the last reward and end."""
    answers = [environment.step(TOKENIZER.encode(turn)) for turn in turns]
    return [TOKENIZER.decode(a.ids) for a in answers], answers[-1].reward, answers[-1].done


@pytest.fixture
def environment():
    """The environment after its prompt."""
    environment = ArithmeticEnvironment()
    assert TOKENIZER.decode(environment.reset(TASK, seed=0)) == "Q12b+7c-5?"
    return environment


def test_vocabulary():
    assert TOKENIZER.size == 38
    assert TOKENIZER.decode([TOKENIZER.pad_id, 38, -1]) == "_\ufffd\ufffd"
    with pytest.raises(ValueError, match="'xz' of 'zx1' is not in the vocabulary"):
        TOKENIZER.encode("zx1")


def test_the_dialogue_of_the_docstring(environment):
    assert talk(environment, "b+7;", "c-5;", "A14.") == (["=19;", "=14;", ""], 1, True)


@given(st.integers(0, 99), OPERATIONS)
def test_the_calculator_calculates(start, operations):
    task = ArithmeticTask(family="chain", start=start, operations=tuple(operations))
    environment = ArithmeticEnvironment()
    environment.reset(task)
    value = start
    for letter, (operator, operand) in zip(LETTERS, operations, strict=False):
        expected = eval(f"{value}{operator}{operand}")
        answer = TOKENIZER.decode(
            environment.step(TOKENIZER.encode(f"{letter}{operator}{operand};")).ids
        )
        if abs(expected) > LARGEST_NUMBER:
            assert answer == "=!;"
        else:
            value = expected
            assert answer == f"={value};"
    assert task.answer == eval(
        "(" * len(operations)
        + str(start)
        + "".join(f"{operator}{operand})" for operator, operand in operations)
    )


@pytest.mark.parametrize(
    "call", ["+7;", "b7;", "b+;", "b+7=19;", "Ab+7;", "b+123456;", "b*99999;", ";", "A14;", "b+-7;"]
)
def test_a_bad_call_changes_nothing(environment, call):
    assert talk(environment, call, "b+7;") == (["=!;", "=19;"], 0, False)


@pytest.mark.parametrize(
    "answer", ["14.", "A14", "A15.", "A-14.", "AA14.", "A14.5.", "A.", "", ".", "Q", "A1_4."]
)
def test_only_the_right_answer_in_the_right_form_earns(environment, answer):
    assert talk(environment, answer) == ([""], 0, True)


def test_leading_zeros_and_no_call_are_fine(environment):
    assert talk(environment, "A014.") == ([""], 1, True)


def test_too_many_calls_end_the_episode(environment):
    answers, reward, done = talk(environment, *["b+0;"] * MAX_CALLS)
    assert (answers[-1], reward, done) == ("=12;", 0, False)
    assert talk(environment, "b+0;") == ([""], 0, True)


def test_the_longest_task_fits():
    longest = ArithmeticTask(
        family="chain", start=99, operations=tuple(("-", i % 7) for i in range(LONGEST_CHAIN))
    )
    assert len(demonstrate(longest).ids) < MAX_CONTEXT
    assert LONGEST_CHAIN < MAX_CALLS
