"""An assistant's tool calls in the shape that its chat template wants.

Data sets write a call's arguments as a JSON text (OpenAI) or as an object (Hugging Face); templates
print one rightly and the other not.  Templates without tool calls get them as text of the message:

    <tool_call>
    {"name": "add", "arguments": {"a": 1}}
    </tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megatron_ext.data.records import Message, call_of, check_arguments


def with_arguments(messages: Sequence[Message], *, as_objects: bool) -> list[Message]:
    """The messages with every call's arguments as an object, or as the JSON text of one.

    Raises:
        BadRecord: arguments are a text that is not JSON, or that of something else.
    """
    convert = _as_object if as_objects else _as_text
    return [
        {**message, "tool_calls": [_converted(call, convert) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def with_calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """The messages with every call as a <tool_call> block at the end of its message's content."""
    return [
        {key: value for key, value in message.items() if key != "tool_calls"}
        | {"content": _content_with_calls(message)}
        for message in messages
    ]


def _content_with_calls(message: Message) -> str:
    parts = [message["content"]] if message.get("content") else []
    for call in message.get("tool_calls") or ():
        function = call_of(call)
        written = {"name": function["name"], "arguments": _as_object(function.get("arguments", {}))}
        parts.append(f"<tool_call>\n{json.dumps(written, ensure_ascii=False)}\n</tool_call>")
    return "\n".join(parts)


def _converted(call: dict[str, Any], convert: Any) -> dict[str, Any]:
    function = call_of(call)
    if "arguments" not in function:
        return call
    function = {**function, "arguments": convert(function["arguments"])}
    return {**call, "function": function} if "function" in call else function


def _as_object(arguments: str | dict[str, Any]) -> dict[str, Any]:
    """Decoded once: what is still a text then was written as JSON twice, and is refused."""
    if isinstance(arguments, dict):
        return arguments
    check_arguments(arguments, "a tool call")
    return json.loads(arguments)


def _as_text(arguments: str | dict[str, Any]) -> str:
    if isinstance(arguments, dict):
        return json.dumps(arguments, ensure_ascii=False)
    check_arguments(arguments, "a tool call")
    return arguments
