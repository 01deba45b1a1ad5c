"""tau-bench result files to chats: tool-use dialogues of an agent with a simulated user.

A result file is a JSON list of trials, {"task_id", "trial", "reward", "traj": [messages], ...}.
Messages keep their role, content, tool_calls, tool_call_id and name; arguments become objects, as
chat templates want them.  Task, trial and reward stay beside the messages as metadata.
Invariant the tests check: every message of a kept trial, once, in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_ext.data.json_lines import BadRecord
from megatron_ext.data.records import REASONING, check_tool_calls
from megatron_ext.data.tool_calls import with_arguments

MESSAGE_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name")
SAID_KEYS = (*REASONING, "refusal", "function_call")
"""Keys that are kept where they are not null: an agent's turn is trained with them, or refused."""


def chats_of_trials(trials: object, *, min_reward: float | None = None) -> list[dict[str, Any]]:
    """A JSONL object for each trial; min_reward leaves out the trials below it (1 = successes).

    Raises:
        ValueError: the input is no result file; all trials that cannot be read are named.
    """
    if not isinstance(trials, list):
        raise ValueError(f"a tau-bench result file holds a list of trials, not {type(trials)}.")
    wrong = [f"trial {i} {reason}" for i, t in enumerate(trials) for reason in _problems(t)]
    if wrong:
        raise ValueError("this is no tau-bench result file:\n  " + "\n  ".join(wrong[:20]))
    return [
        {
            "messages": with_arguments(list(map(_message, trial["traj"])), as_objects=True),
            "task_id": trial["task_id"],
            "trial": trial.get("trial", 0),
            "reward": trial["reward"],
        }
        for trial in trials
        if min_reward is None or trial["reward"] >= min_reward
    ]


def split_by_task(
    chats: Iterable[dict[str, Any]], *, every: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(training, validation): every `every`-th task is for validation, with all its trials."""
    kept: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    places: dict[object, int] = {}
    for chat in chats:
        place = places.setdefault(chat["task_id"], len(places))
        kept[place % every == every - 1].append(chat)
    return kept


def _message(message: dict[str, Any]) -> dict[str, Any]:
    said = {key: message[key] for key in SAID_KEYS if message.get(key) is not None}
    return {key: message[key] for key in MESSAGE_KEYS if key in message} | said


def _problems(trial: object) -> Sequence[str]:
    if not isinstance(trial, dict):
        return ["is not an object"]
    missing = [key for key in ("task_id", "reward", "traj") if key not in trial]
    if missing:
        return [f"has no {', '.join(missing)}"]
    if not isinstance(trial["reward"], int | float):
        return ["has a reward that is not a number"]
    if not isinstance(trial["task_id"], int | str):
        return ["has a task_id that is neither a number nor text"]
    messages = trial["traj"]
    if not isinstance(messages, list) or not messages:
        return ["has no messages in traj"]
    if not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        return ["has messages without a role in traj"]
    return _call_problems(messages)


def _call_problems(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    for index, message in enumerate(messages):
        try:
            if message.get("tool_calls") is not None:
                check_tool_calls(message["tool_calls"], f"traj[{index}].tool_calls")
        except BadRecord as error:
            return [f"is bad: {error}"]
    return []
