"""The procedural data sets of reasoning-gym, by name, with their own scorers.

A response states its answer between <answer> and </answer>; the last one counts.  Tasks are split
by their text, so no held-out question is ever trained on.
Not covered: data sets that are made of others (composite), curricula.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import ModuleType
from typing import Any

from megatron_ext.environments.calls import Attempt
from megatron_ext.environments.split import is_held_out
from megatron_ext.environments.text import Message, TextCodec, TextEnvironment
from megatron_ext.rewards.base import Verdict

NUM_QUESTIONS = 10_000
"""Questions of a data set; training begins anew after them."""
INSTRUCTION = (
    "Think step by step, then give only your final answer between <answer> and </answer>, in the "
    "format that the question asks for."
)


@dataclass(frozen=True, kw_only=True)
class ReasoningTask:
    """One question, and what its scorer needs."""

    id: str
    question: str
    as_chat: bool
    entry: Mapping[str, Any] = field(repr=False)

    @property
    def prompt(self) -> str | tuple[Message, ...]:
        """Instruction and question, as a chat or as one text."""
        if not self.as_chat:
            return f"{INSTRUCTION}\n\n{self.question}\n\n"
        return (
            {"role": "system", "content": INSTRUCTION},
            {"role": "user", "content": self.question},
        )

    @property
    def metadata(self) -> dict[str, str]:
        """The data set's name, as the family."""
        return {"family": self.id.rpartition(":")[0]}


class ReasoningGymSource:
    """The questions of one data set."""

    def __init__(
        self,
        name: str,
        *,
        codec: TextCodec,
        seed: int = 0,
        as_chat: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """A source; options: of the data set (its config's fields).

        Raises:
            ValueError: reasoning-gym is not installed, has no such data set, or refuses an option.
        """
        self._dataset = _open(name, seed=seed, options=options or {})
        self._name, self._codec, self._as_chat = name, codec, as_chat

    def train(self, position: int) -> ReasoningTask:
        """The task at a position: of the question there, or of the next that is not held out."""
        return next(self._tasks(position, held_out=False))

    def held_out(self, count: int) -> list[ReasoningTask]:
        """The first `count` held-out questions, each once."""
        found: dict[str, ReasoningTask] = {}
        for task in self._tasks(0, held_out=True):
            found.setdefault(task.question, task)
            if len(found) >= count:
                break
        if len(found) < count:
            raise ValueError(
                f"reasoning-gym:{self._name} has {len(found)} held-out questions, {count} are "
                "wanted: ask for fewer."
            )
        return list(found.values())[:count]

    def environment(self) -> TextEnvironment:
        """A new environment that grades with the data set's scorer."""
        return TextEnvironment(self._codec, self._grade)

    def _tasks(self, start: int, *, held_out: bool) -> Iterator[ReasoningTask]:
        for position in range(start, start + NUM_QUESTIONS):
            index = position % NUM_QUESTIONS
            entry = self._dataset[index]
            if is_held_out(entry["question"]) == held_out:
                yield ReasoningTask(
                    id=f"{self._name}:{index}",
                    question=entry["question"],
                    as_chat=self._as_chat,
                    entry=entry,
                )

    def _grade(self, task: ReasoningTask, response: str) -> Verdict:
        """The scorer's verdict; some scorers raise on answers of a kind they do not expect."""
        answer = _stated(response)
        if answer is None:
            return Verdict(reward=0.0)
        with Attempt() as attempt:
            score = float(self._dataset.score_answer(answer, dict(task.entry)))
            return Verdict(reward=min(max(score, 0.0), 1.0), answer=answer)
        assert attempt.failure is not None
        return Verdict(
            reward=0.0, answer=answer, error=f"the scorer raised {attempt.failure.reason}"
        )


def _stated(response: str) -> str | None:
    """What the response gives between the last pair of answer tags."""
    _, tag, rest = response.rpartition("<answer>")
    answer, closing, _ = rest.partition("</answer>")
    return answer.strip() if tag and closing else None


def _open(name: str, *, seed: int, options: Mapping[str, Any]) -> Any:
    gym = _library()
    known = sorted(importlib.import_module("reasoning_gym.factory").DATASETS)
    if name not in known:
        close = get_close_matches(name, known) or known
        raise ValueError(
            f"--tasks reasoning-gym:{name}: there is no such data set. Of {len(known)}, try "
            f"{', '.join(close[:8])}."
        )
    try:
        return gym.create_dataset(name, seed=seed, size=NUM_QUESTIONS, **options)
    except (TypeError, AssertionError) as error:
        raise ValueError(f"--tasks reasoning-gym:{name}: {error}.") from error


def _library() -> ModuleType:
    try:
        return importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--tasks reasoning-gym:... needs a package that is not installed ({error.name}): "
            "pip install reasoning-gym."
        ) from error
