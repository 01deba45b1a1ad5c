"""A line of a JSONL file as a checked record: a chat, a text, or a prompt with its completion.

Keys that are none of ours are metadata and left alone; a message keeps all its keys, for the chat
template.  Invariant the tests check: any line gives a record or a `BadRecord` with its reason.
Not covered: content in parts (images), chats as a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_ext.data.json_lines import BadRecord, kind_of, parse_object, parse_value, shown

Message = dict[str, Any]
"""One message as it was written: role, content, perhaps tool_calls, name, ..."""

REASONING = ("reasoning_content", "reasoning", "thinking", "thought")
"""Keys under which a message may have what was thought before its content was said."""


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A conversation, of which the assistant's turns are trained."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    """What the assistant may call, as JSON schemas."""

    def trained(self) -> list[int]:
        """Indices of the messages to train: the assistant's, but for those of weight 0."""
        return [
            index
            for index, message in enumerate(self.messages)
            if message["role"] == "assistant" and message.get("weight") != 0
        ]


@dataclass(frozen=True, kw_only=True)
class Text:
    """A document, trained as a whole."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A prompt and what follows it, which is trained."""

    prompt: str
    completion: str


Record = Chat | Text | Completion
FORMS = {"messages": ("messages",), "text": ("text",), "prompt": ("prompt", "completion")}
"""The key that tells a form -> all keys that the form needs."""


def parse_record(line: bytes | str) -> Record:
    """The record of one line.

    Raises:
        BadRecord: the line is not JSON as `json_lines` accepts it, of no form or of several, or a
            value of its form is missing, empty or of the wrong type.
    """
    values = parse_object(line)
    forms = [form for form, keys in FORMS.items() if any(key in values for key in keys)]
    if not forms:
        keys = ", ".join(key[:40] for key in list(values)[:5]) or "none"
        raise BadRecord(
            f"has none of the keys messages, text, or prompt and completion (its keys: {keys})"
        )
    if len(forms) > 1:
        raise BadRecord(f"has {' and '.join(forms)}: keep one, nothing says which to train")
    match forms[0]:
        case "messages":
            return _chat(values)
        case "text":
            return Text(text=_text(values, "text"))
    return Completion(prompt=_text(values, "prompt"), completion=_text(values, "completion"))


def call_of(tool_call: dict[str, Any]) -> dict[str, Any]:
    """Name and arguments of a tool call, in OpenAI's form ({"function": ...}) or bare."""
    return tool_call.get("function", tool_call)


def _text(values: dict[str, Any], key: str) -> str:
    if key not in values:
        raise BadRecord(f"has no {key}")
    value = values[key]
    if not isinstance(value, str):
        raise BadRecord(f"{key} is {kind_of(value)}, not text")
    if not value:
        raise BadRecord(f"{key} is empty")
    return value


def _chat(values: dict[str, Any]) -> Chat:
    messages, tools = values["messages"], values.get("tools")
    if not isinstance(messages, list):
        raise BadRecord(f"messages is {kind_of(messages)}, not a list")
    if not messages:
        raise BadRecord("messages is empty")
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise BadRecord("tools is not a list of objects")
    chat = Chat(messages=messages, tools=tools or None)
    if not chat.trained():
        raise BadRecord("has no assistant message to train")
    return chat


def _check_message(message: object, name: str) -> None:
    if not isinstance(message, dict):
        raise BadRecord(f"{name} is {kind_of(message)}, not an object")
    role, content, calls = (message.get(key) for key in ("role", "content", "tool_calls"))
    if not isinstance(role, str) or not role:
        raise BadRecord(f"{name} has no role" if role is None else f"{name}.role is not text")
    if content is not None and not isinstance(content, str):
        raise BadRecord(f"{name}.content is {kind_of(content)}, not text")
    if calls is not None:
        check_tool_calls(calls, f"{name}.tool_calls")
    if message.get("function_call") is not None:
        raise BadRecord(f"{name} has a function_call: write it as tool_calls")
    for key in REASONING:
        if isinstance(message.get(key), list | dict):
            raise BadRecord(f"{name}.{key} is {kind_of(message[key])}, not text")
    if content is None and not calls:
        raise BadRecord(f"{name} has no content" + (" and no tool_calls" * (role == "assistant")))


def check_tool_calls(calls: object, name: str) -> None:
    """Refuse, with `BadRecord`, what is no list of calls with a name and an object of arguments.

    name: of the calls, for messages.
    """
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadRecord(f"{name} is not a list of objects")
    for index, call in enumerate(calls):
        function = call_of(call)
        called = function.get("name") if isinstance(function, dict) else None
        if not isinstance(called, str) or not called:
            raise BadRecord(f"{name}[{index}] names no function")
        check_arguments(function.get("arguments", {}), f"{name}[{index}]")


def check_arguments(arguments: object, name: str) -> None:
    """Refuse arguments that are neither an object nor the JSON text of one (OpenAI's form)."""
    if isinstance(arguments, dict):
        return
    if not isinstance(arguments, str):
        raise BadRecord(f"{name} has arguments that are neither an object nor text")
    try:
        written = parse_value(arguments)
    except BadRecord as error:
        raise BadRecord(f"{name} has arguments {shown(arguments)}: the text {error}") from error
    if not isinstance(written, dict):
        twice = ", as of arguments written as JSON twice" if isinstance(written, str) else ""
        raise BadRecord(
            f"{name} has arguments that are the JSON text of {kind_of(written)}, not of an object"
            f"{twice}"
        )
