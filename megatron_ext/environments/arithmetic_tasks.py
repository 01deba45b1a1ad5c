"""The built-in tasks: sums to be worked out with a calculator that remembers one number.

A prompt is `Q12b+7c-5?`: the calculator starts at 12, and each further term has a letter, so that
the next one can be found.  Three families, from easy to hard: `digits` (x+y, one digit each, any
letter), `single` (one operation on larger numbers), `chain` (2 to 13 operations).
Invariants the tests check: one task in five of each family is held out, and none of these is ever
drawn for training; each family has its share of what is drawn, on both sides of the split.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megatron_ext.environments.characters import CharacterTokenizer
from megatron_ext.environments.split import is_held_out

Family = Literal["digits", "single", "chain"]
Mix = Mapping[Family, float]

TOKENIZER = CharacterTokenizer("0123456789+-*=;QCA?.!_abcdefghijklmnop", pad="_")
LETTERS = "bcdefghijklmnop"

TASK_MIX: Mix = {"digits": 0.35, "single": 0.30, "chain": 0.35}
"""Shares of the families in training and among the held-out tasks."""
DEMONSTRATION_MIX: Mix = {"digits": 0.2, "single": 0.2, "chain": 0.6}
"""Shares of the families in the demonstrations."""

LONGEST_CHAIN = 13
CHAIN_GROWTH = 0.78
"""Probability that a chain goes on after two operations or more."""
_MANY_TRIES = 300


@dataclass(frozen=True, kw_only=True)
class ArithmeticTask:
    """One sum."""

    family: Family
    start: int
    operations: tuple[tuple[str, int], ...]
    """Operator (+, -, *) and operand of each step."""
    first_letter: str = "b"

    @cached_property
    def expression(self) -> str:
        """The sum as written in the prompt: 12b+7c-5."""
        first = LETTERS.index(self.first_letter)
        terms = [
            f"{letter}{operator}{operand}"
            for letter, (operator, operand) in zip(LETTERS[first:], self.operations, strict=False)
        ]
        return "".join([str(self.start), *terms])

    @property
    def id(self) -> str:
        """The expression."""
        return self.expression

    @property
    def prompt(self) -> str:
        """What the policy is asked."""
        return f"Q{self.expression}?"

    @cached_property
    def answer(self) -> int:
        """The right answer."""
        value = self.start
        for operator, operand in self.operations:
            value = apply(operator, value, operand)
        return value

    @property
    def level(self) -> int:
        """Difficulty: 0 for a sum of digits, else the number of operations."""
        return 0 if self.family == "digits" else len(self.operations)

    @property
    def metadata(self) -> dict[str, str | int]:
        """Family and level."""
        return {"family": self.family, "level": self.level}


def apply(operator: str, value: int, operand: int) -> int:
    """`value operator operand`, exactly."""
    if operator == "*":
        return value * operand
    return value + operand if operator == "+" else value - operand


def draw_task(rng: random.Random, *, mix: Mix = TASK_MIX, held_out: bool = False) -> ArithmeticTask:
    """A random task of one side of the split.

    The family is drawn first and kept while tasks of the other side are rejected: rejecting whole
    draws would favour the families of which more is on the wanted side.
    """
    (family,) = rng.choices(list(mix), weights=list(mix.values()))
    while True:
        task = draw_of_family(rng, family)
        if is_held_out(task.expression) == held_out:
            return task


def draw_of_family(rng: random.Random, family: Family) -> ArithmeticTask:
    """A random task of a family, held out or not."""
    if family == "digits":
        return ArithmeticTask(
            family=family,
            start=rng.randint(1, 9),
            operations=(("+", rng.randint(1, 9)),),
            first_letter=rng.choice(LETTERS),
        )
    if family == "single":
        return _draw_single(rng)
    return _draw_chain(rng)


class ArithmeticTasks:
    """The tasks of a run: an endless sequence to train on, and a list that is held out."""

    def __init__(self, *, seed: int = 0, mix: Mix = TASK_MIX) -> None:
        self._seed = seed
        self._mix = mix

    def train(self, position: int) -> ArithmeticTask:
        """The training task at a position of the sequence."""
        return draw_task(random.Random(f"train {self._seed} {position}"), mix=self._mix)

    def held_out(self, count: int) -> list[ArithmeticTask]:
        """The first `count` held-out tasks, each once, the same for every seed.

        A family that has no more (there are about 240 held-out sums of digits) leaves its place to
        chains.
        """
        rng, found = random.Random("held out"), dict[str, ArithmeticTask]()
        while len(found) < count:
            (family,) = rng.choices(list(self._mix), weights=list(self._mix.values()))
            for tried in range(2 * _MANY_TRIES):
                task = draw_of_family(rng, family if tried < _MANY_TRIES else "chain")
                if is_held_out(task.expression) and task.expression not in found:
                    found[task.expression] = task
                    break
        return list(found.values())


def _draw_single(rng: random.Random) -> ArithmeticTask:
    if rng.random() < 0.15:
        start, operation = rng.randint(2, 9), ("*", rng.randint(11, 59))
    else:
        start = rng.randint(10, 99)
        operand = rng.randint(2, 9) if rng.random() < 0.6 else rng.randint(10, 99)
        operation = (rng.choice("+-") if operand <= start else "+", operand)
    return ArithmeticTask(family="single", start=start, operations=(operation,))


def _draw_chain(rng: random.Random) -> ArithmeticTask:
    """Operations are distinct and the running total is never negative."""
    length = 2
    while length < LONGEST_CHAIN and rng.random() < CHAIN_GROWTH:
        length += 1
    start = total = rng.randint(10, 30)
    operations: list[tuple[str, int]] = []
    while len(operations) < length:
        operation = (rng.choice("+-"), rng.randint(1, 9))
        value = apply(operation[0], total, operation[1])
        if operation not in operations and value >= 0:
            operations.append(operation)
            total = value
    return ArithmeticTask(family="chain", start=start, operations=tuple(operations))
