"""The built-in environment: a calculator that remembers one number, and an exact reward.

    Q12b+7c-5?   b+7;   =19;   c-5;   =14;   A14.
    (prompt)   (policy) (env) (policy) (env) (policy)

A call is letter, operator, operand, `;`: it changes the memory and is answered with it.  Anything
else that ends in `;` is answered `=!;` and changes nothing.  A turn that ends in `.` is the answer,
and so is one that ends in neither: reward 1 if it is exactly `A<number>.` with the right number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_ext.environments.arithmetic_tasks import (
    TOKENIZER,
    ArithmeticTask,
    ArithmeticTasks,
    apply,
)
from megatron_ext.environments.base import Observation

MAX_CALLS = 16
MAX_CONTEXT = 160
"""Tokens of the longest episode that earns anything: give the runner at most this `max_context`."""
LARGEST_NUMBER = 99_999
"""The memory stays within this, either sign; a call that would leave it is a bad one."""

_CALL = re.compile(r"[a-p]([-+*])(\d{1,5});")
_ANSWER = re.compile(r"A(-?\d{1,9})\.")


class ArithmeticEnvironment:
    """One episode at a time; instant, so it needs no worker."""

    is_instant = True
    stop_ids = frozenset(TOKENIZER.encode(";."))

    def __init__(self) -> None:
        self._task: ArithmeticTask | None = None
        self._memory = 0
        self._num_calls = 0

    def reset(self, task: ArithmeticTask, *, seed: int = 0) -> list[int]:
        """The prompt; the seed has no effect, as nothing is random."""
        self._task, self._memory, self._num_calls = task, task.start, 0
        return TOKENIZER.encode(task.prompt)

    def step(self, sampled: Sequence[int]) -> Observation:
        """The calculator's answer to a call, or the reward of an answer."""
        assert self._task is not None, "reset comes before step"
        text = TOKENIZER.decode(sampled)
        if not text.endswith(";"):
            answer = _ANSWER.fullmatch(text)
            is_right = answer is not None and int(answer[1]) == self._task.answer
            return Observation(reward=float(is_right), done=True)
        self._num_calls += 1
        if self._num_calls > MAX_CALLS:
            return Observation(done=True)
        return Observation(ids=TOKENIZER.encode(f"={self._called(text)};"))

    def _called(self, text: str) -> str:
        """The new memory after a call, or "!" after a bad one."""
        call = _CALL.fullmatch(text)
        value = None if call is None else apply(call[1], self._memory, int(call[2]))
        if value is None or abs(value) > LARGEST_NUMBER:
            return "!"
        self._memory = value
        return str(value)


class ArithmeticSource(ArithmeticTasks):
    """The built-in tasks with their environment."""

    def environment(self) -> ArithmeticEnvironment:
        """A new environment."""
        return ArithmeticEnvironment()
