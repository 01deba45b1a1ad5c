"""Prompts from a JSONL file, and completions to one.

    {"prompt": "What is 6 x 7?"}
    {"messages": [{"role": "user", "content": "..."}], "id": 3}
    {"prompt_ids": [1, 42, 7]}

Other keys of a line are kept in its results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ext.data.json_lines import BadRecord, numbered_lines, parse_object
from megatron_ext.data.records import check_tool_calls
from megatron_ext.rollout.types import Completion

Record = dict[str, Any]
_KINDS = {"prompt": str, "messages": list, "prompt_ids": list}
_MOST_REPORTED = 10


def read_prompts(path: Path) -> list[Record]:
    """The lines of a file as objects; blank ones are skipped.

    Raises:
        ValueError: the file holds no prompt, or lines that are none, each with its number.
    """
    records, wrong = [], []
    for number, line in numbered_lines(path):
        try:
            record = parse_object(line)
            problem = _problem(record)
        except BadRecord as error:
            wrong.append(f"line {number} {error}.")
            continue
        records.append(record)
        wrong += [f"line {number} {problem}."] if problem else []
    if wrong:
        more = [f"and {len(wrong) - _MOST_REPORTED} more."] if len(wrong) > _MOST_REPORTED else []
        raise ValueError("\n  ".join([f"{path}:", *wrong[:_MOST_REPORTED], *more]))
    if not records:
        raise ValueError(f"{path} holds no prompt: write one JSON object a line.")
    return records


def _problem(record: Record) -> str:
    kinds = [name for name in _KINDS if name in record]
    if len(kinds) != 1:
        return f"has {kinds or 'none'} of {list(_KINDS)}: give one"
    value = record[kinds[0]]
    if not isinstance(value, _KINDS[kinds[0]]) or not value:
        return f"has an empty or wrong {kinds[0]}"
    if kinds[0] == "prompt_ids" and not all(type(token) is int for token in value):
        return "has prompt_ids that are not integers"
    if kinds[0] == "messages" and not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in value
    ):
        return "has messages without a `role`"
    if kinds[0] == "messages" and not all(
        isinstance(message.get("content"), str | None) for message in value
    ):
        return "has messages whose `content` is not text"
    if kinds[0] == "messages":
        _check_calls(value)
    return ""


def _check_calls(messages: Sequence[Record]) -> None:
    for index, message in enumerate(messages):
        if message.get("tool_calls") is not None:
            check_tool_calls(message["tool_calls"], f"messages[{index}].tool_calls")


def prompt_ids(
    record: Mapping[str, Any], *, encode: Callable[[str | list[Any]], Sequence[int]]
) -> tuple[int, ...]:
    """The ids of a line's prompt; `encode` knows plain texts and chats."""
    if "prompt_ids" in record:
        return tuple(record["prompt_ids"])
    return tuple(encode(record["prompt"] if "prompt" in record else record["messages"]))


def result(
    record: Mapping[str, Any], completion: Completion, *, text: str, sample: int, logprobs: bool
) -> Record:
    """The line of one completion; other keys of the prompt stand under `metadata`."""
    kind = next(name for name in _KINDS if name in record)
    found = {
        kind: record[kind],
        "metadata": {name: value for name, value in record.items() if name != kind},
        "sample": sample,
        "completion": text,
        "token_ids": list(completion.token_ids),
        "stop_reason": completion.stop_reason,
    }
    if logprobs:
        found["logprobs"] = list(completion.logprobs)
    if completion.top_logprobs:
        found["top_logprobs"] = [list(pairs) for pairs in completion.top_logprobs]
    return found
