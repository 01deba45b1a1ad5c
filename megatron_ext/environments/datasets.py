r"""Tasks from a JSONL file: one object a line, checked as a whole before anything runs.

    {"prompt": "What is 6 x 7?", "answer": "42", "verifier": "numeric"}
    {"messages": [{"role": "user", "content": "..."}], "answer": "\\frac{1}{2}",
     "verifier": "math", "metadata": {"level": 3}}

`id` names a task (default: its line number); whatever else is there is kept as metadata.
Invariant the tests check: each malformed line is reported with its number and the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from megatron_ext.data.json_lines import BadRecord, numbered_lines, parse_object, shown
from megatron_ext.data.order import SampleOrder
from megatron_ext.data.records import check_tool_calls
from megatron_ext.environments.text import Message, TextCodec, TextEnvironment
from megatron_ext.rewards.base import Verdict, VerifierName
from megatron_ext.rewards.verifiers import VERIFIER_NAMES, Verifiers, known_answer_problem

MOST_REPORTED = 10
"""Malformed lines named in an error; the rest is counted."""


@dataclass(frozen=True, kw_only=True)
class TextTask:
    """A question with a known answer."""

    id: str
    prompt: str | tuple[Message, ...]
    answer: str
    verifier: VerifierName
    metadata: Mapping[str, Any] = field(default_factory=dict)


def read_tasks(path: str | Path) -> list[TextTask]:
    """The tasks of a JSONL file, in its order; blank lines are skipped.

    Raises:
        ValueError: the file holds no task, or lines that are none: each is named with its number.
    """
    return read_lines(path, lambda line, number: parse_task(line, default_id=number))


def read_lines(path: str | Path, parse: Callable[[bytes, str], TextTask]) -> list[TextTask]:
    """The tasks of a file of which `parse` makes one from a line and its number; as `read_tasks`.

    parse: raises `ValueError` with what is wrong with a line.
    """
    tasks: list[TextTask] = []
    wrong: list[str] = []
    num_wrong = 0
    for number, line in numbered_lines(path):
        try:
            tasks.append(parse(line, str(number)))
        except ValueError as error:
            num_wrong += 1
            wrong += [f"line {number}: {error}"] if num_wrong <= MOST_REPORTED else []
    if wrong:
        more = f"\n  and {num_wrong - MOST_REPORTED} more" if num_wrong > MOST_REPORTED else ""
        raise ValueError("\n  ".join([f"{path}:", *wrong]) + more)
    if not tasks:
        raise ValueError(f"{path} holds no task: write one JSON object a line.")
    names = set[str]()
    twice = sorted({t.id for t in tasks if t.id in names or names.add(t.id)})
    if twice:
        raise ValueError(
            f"{path}: more than one task has the id {shown(twice[0])}; ids must differ."
        )
    return tasks


def parse_task(line: bytes, *, default_id: str) -> TextTask:
    """The task of one line; `ValueError` with everything that is wrong with it."""
    return task_of_record(parse_object(line), default_id=default_id)


def task_of_record(record: Mapping[str, Any], *, default_id: str) -> TextTask:
    """The task that an object describes; `ValueError` with everything that is wrong with it."""
    wrong = [
        *_prompt_problems(record),
        *_answer_problems(record.get("answer"), record.get("verifier")),
        *_metadata_problems(record),
    ]
    if wrong:
        raise ValueError("; ".join(wrong))
    known = {"id", "prompt", "messages", "answer", "verifier", "metadata"}
    return TextTask(
        id=str(record.get("id", default_id)),
        prompt=record["prompt"] if "prompt" in record else tuple(record["messages"]),
        answer=str(record["answer"]),
        verifier=cast(VerifierName, record["verifier"]),
        metadata={k: v for k, v in record.items() if k not in known} | record.get("metadata", {}),
    )


class JsonlSource:
    """The tasks of a file to train on, and those of another that is held out."""

    def __init__(
        self,
        tasks: Sequence[TextTask],
        *,
        held_out: Sequence[TextTask],
        codec: TextCodec,
        verify: Verifiers,
        seed: int = 0,
    ) -> None:
        self.num_held_out = len(held_out)
        self._tasks = tasks
        self._held_out = held_out
        self._order = SampleOrder(num_samples=len(tasks), seed=seed)
        self._codec = codec
        self._verify = verify

    def train(self, position: int) -> TextTask:
        """The task at a position: every task once an epoch, in the epoch's own order."""
        return self._tasks[self._order.take(position, 1)[0]]

    def held_out(self, count: int) -> Sequence[TextTask]:
        """The first `count` tasks of the held-out file."""
        if count > len(self._held_out):
            raise ValueError(
                f"{count} held-out tasks are wanted, but --eval-tasks has {len(self._held_out)}: "
                "give a longer file, or ask for fewer."
            )
        return self._held_out[:count]

    def environment(self) -> TextEnvironment:
        """A new environment that grades with the task's verifier."""
        return TextEnvironment(self._codec, partial(_grade, self._verify))


def _grade(verify: Verifiers, task: TextTask, response: str) -> Verdict:
    return verify(task.verifier, response, answer=task.answer)


def _prompt_problems(record: Mapping[str, Any]) -> list[str]:
    if "prompt" in record and "messages" in record:
        return ["has both `prompt` and `messages`: give one of them"]
    if "prompt" not in record and "messages" not in record:
        return ["has no `prompt` and no `messages`: give one of them"]
    if "prompt" in record:
        prompt = record["prompt"]
        is_text = isinstance(prompt, str) and prompt.strip()
        return [] if is_text else ["`prompt` must be a text that is not empty"]
    messages = record["messages"]
    if not isinstance(messages, list) or not messages:
        return ["`messages` must be a list that is not empty"]
    is_message = [
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in messages
    ]
    if not all(is_message):
        return [f"`messages[{is_message.index(False)}]` must have the texts `role` and `content`"]
    return _call_problems(messages)


def _call_problems(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    for index, message in enumerate(messages):
        try:
            if message.get("tool_calls") is not None:
                check_tool_calls(message["tool_calls"], f"messages[{index}].tool_calls")
        except BadRecord as error:
            return [str(error)]
    return []


def _answer_problems(answer: object, verifier: object) -> list[str]:
    wrong = []
    if verifier not in VERIFIER_NAMES:
        wrong.append(f"`verifier` is {shown(verifier)}: use {', '.join(VERIFIER_NAMES)}")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return [*wrong, "`answer` must be a text or a number"]
    if not str(answer).strip():
        wrong.append("`answer` is empty")
    elif not wrong:
        problem = known_answer_problem(cast(VerifierName, verifier), str(answer))
        wrong += [f"`answer` {problem}"] if problem else []
    return wrong


def _metadata_problems(record: Mapping[str, Any]) -> list[str]:
    wrong = []
    if not isinstance(record.get("metadata", {}), dict):
        wrong.append("`metadata` must be an object")
    if not isinstance(record.get("id", ""), str | int):
        wrong.append("`id` must be a text or a whole number")
    return wrong
