"""What a chat template leaves out of an assistant's turn that is to be trained.

Content and thoughts are looked for in the turn as text; templates may change the white space and
escape it as JSON.  Tool calls are written in too many ways for that: the turn is written once more
with another value in each place of their arguments, and every one of these must appear.
Not covered: keys that are neither content, thoughts nor tool_calls, which templates may pass over.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_ext.data.records import REASONING, Message, call_of

_SAID = ("content", *REASONING, "refusal")
_TAIL = 200
"""Characters of the prompt that may be the beginning of the content, such as a <think> tag."""


def texts_left_out(message: Message, *, prompt: str, turn: str) -> list[str]:
    """Keys of the message whose text is not in its turn; prompt: what stands before the turn."""
    texts = {key: text for key in _SAID if isinstance(text := message.get(key), str)}
    missing = [key for key, text in texts.items() if text.strip() and text.strip() not in turn]
    if not missing:
        return []
    turn = _squeezed(turn)
    before = _squeezed(prompt[-_TAIL:])
    return [key for key in missing if not _is_written(texts[key], before=before, turn=turn)]


def calls_left_out(message: Message, *, turn: str, marked_turn: str) -> list[str]:
    """Names of tool calls of which something is not in the turn.

    marked_turn: the turn of the message with the calls of `with_marked_calls`.
    """
    missing = []
    times = Counter(call_of(call)["name"] for call in message.get("tool_calls") or ())
    for index, call in enumerate(message.get("tool_calls") or ()):
        name = call_of(call)["name"]
        marks = [str(mark) for mark in _marks(_marked_arguments(call_of(call), index))]
        if not all(mark in marked_turn for mark in marks) or turn.count(name) < (
            1 if marks else times[name]
        ):
            missing.append(name)
    return missing


def with_marked_calls(message: Message) -> Message:
    """The message with a value of its own in each place of its tool calls' arguments."""
    calls = []
    for index, call in enumerate(message["tool_calls"]):
        function = call_of(call)
        if "arguments" in function:
            marked: Any = _marked_arguments(function, index)
            is_text = isinstance(function["arguments"], str)
            written = json.dumps(marked, ensure_ascii=False) if is_text else marked
            function = {**function, "arguments": written}
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}


def _marked_arguments(function: Mapping[str, Any], index: int) -> Any:
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return _marked(arguments, numbers=iter(range(9_070_001 + 100_000 * index, 10**15)))


def _marked(value: Any, *, numbers: Iterator[int]) -> Any:
    """The value with other texts and numbers, of the same kinds and in the same places."""
    match value:
        case bool() | None:
            return value
        case str():
            return f"mark{next(numbers)}"
        case int():
            return next(numbers)
        case float():
            return next(numbers) + 0.5
        case list():
            return [_marked(item, numbers=numbers) for item in value]
    return {key: _marked(item, numbers=numbers) for key, item in value.items()}


def _marks(value: Any) -> Iterator[str | int | float]:
    match value:
        case bool() | None:
            return
        case str() | int() | float():
            yield value
        case list():
            for item in value:
                yield from _marks(item)
        case _:
            for item in value.values():
                yield from _marks(item)


def _is_written(text: str, *, before: str, turn: str) -> bool:
    text = text.strip()
    ways = {text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]}
    return any(_ends_in(_squeezed(way), before=before, turn=turn) for way in ways)


def _ends_in(text: str, *, before: str, turn: str) -> bool:
    """Whether the turn has the text, of which the prompt may have the beginning."""
    start = max(0, len(before) - len(text) + 1)
    return text in before[start:] + turn


def _squeezed(text: str) -> str:
    return "".join(text.split())
