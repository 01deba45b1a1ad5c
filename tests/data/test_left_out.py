"""CASES N13: what is to be trained of a turn is in its text, or its line is bad with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ext.data.hugging_face import HuggingFaceTokenizer
from megatron_ext.data.records import BadRecord, Chat
from megatron_ext.data.samples import samples_of
from megatron_ext.data.tokenizer import ByteTokenizer
from tests.data.tiny_tokenizer import CHATML, GENERATION, HERMES, byte_tokenizer

ONLY_FIRST_CALL = HERMES.replace("in message.tool_calls", "in (message.tool_calls or [])[:1]")
NO_ARGUMENTS = HERMES.replace("call.function.arguments | tojson", "'{}'")
ONLY_FIRST_ARGUMENT = HERMES.replace(
    "call.function.arguments | tojson", "call.function.arguments.values() | first | tojson"
)
CALLS_WITHOUT_CONTENT = HERMES.replace(
    "+ message.content", "+ (message.content if not message.tool_calls else '')"
)
PYTHONIC = HERMES.replace(
    "call.function.arguments | tojson",
    "'(' + call.function.arguments | items | map('join', '=') | join(', ') + ')'",
)
THOUGHTS = CHATML.replace(
    "+ message.content",
    "+ ('<think>\n' + message.reasoning_content + '\n</think>\n' if message.reasoning_content else"
    " '') + message.content",
)
WITHOUT_TAGS = CHATML.replace("message.content", "message.content.split('</think>')[-1]")
PROMPTS_TO_THINK = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
AS_JSON = CHATML.replace("+ message.content", "+ (message.content | trim | tojson)")
TRIMMED = CHATML.replace("message.content", "(message.content | trim)")


def calls(*arguments: Any, name: str = "add") -> list[dict[str, Any]]:
    """Tool calls of one function."""
    return [{"type": "function", "function": {"name": name, "arguments": a}} for a in arguments]


def encode(template: str, **message: Any) -> str:
    """The trained text of an assistant's message after a question."""
    messages = [{"role": "user", "content": "1+1? add add"}, {"role": "assistant"} | message]
    core = byte_tokenizer(template=template)
    [sample] = samples_of(Chat(messages=messages), HuggingFaceTokenizer(core))
    return str(core.decode(sample.tokens[sample.mask].tolist()))


@pytest.mark.parametrize(
    ("template", "message", "reason"),
    [
        (CHATML, {"content": "2", "reasoning_content": "one more"}, "leaves out reasoning_content"),
        (CHATML, {"content": "2", "reasoning": "one more"}, "leaves out reasoning"),
        (CHATML, {"content": "2", "thinking": "one more"}, "leaves out thinking"),
        (GENERATION, {"content": "2", "thinking": "one more"}, "leaves out thinking"),
        (CHATML, {"content": "", "refusal": "No."}, "leaves out refusal"),
        (WITHOUT_TAGS, {"content": "<think>hm</think>2"}, "leaves out content, or a part of it"),
        (CHATML.replace("message.content", "''"), {"content": "1+1?"}, "leaves out content"),
        (CHATML, {"content": "add", "tool_calls": calls({"a": 1})}, "the tool call add"),
        (ONLY_FIRST_CALL, {"tool_calls": calls({"a": "é"}, {"a": "b"})}, "the tool call add"),
        (ONLY_FIRST_CALL, {"tool_calls": calls('{"a": 1}', '{"a": 1}')}, "the tool call add"),
        (ONLY_FIRST_CALL, {"tool_calls": calls({}, {})}, "the tool call add"),
        (
            ONLY_FIRST_CALL,
            {"content": "add 1 and add 2", "tool_calls": calls({"a": 1}, {"a": 2})},
            "the tool call add",
        ),
        (NO_ARGUMENTS, {"tool_calls": calls({"a": 1})}, "the tool call add, or a part of it"),
        (ONLY_FIRST_ARGUMENT, {"tool_calls": calls({"a": 1, "b": 1.5})}, "the tool call add"),
        (
            CALLS_WITHOUT_CONTENT,
            {"content": "I add.", "tool_calls": calls({"a": 1})},
            "leaves out content",
        ),
    ],
)
def test_n13_what_a_template_leaves_out_is_a_bad_line(template, message, reason) -> None:
    """CASES N13."""
    with pytest.raises(BadRecord, match=rf"messages\[1\]: the chat template .*{reason}"):
        encode(template, **message)


@pytest.mark.parametrize(
    ("template", "message", "text"),
    [
        (THOUGHTS, {"content": "2", "reasoning": "hm"}, "<think>\nhm\n</think>\n2"),
        (THOUGHTS, {"content": "2", "reasoning_content": " hm\n"}, "<think>\n hm\n\n</think>\n2"),
        (THOUGHTS, {"content": "2", "thinking": None, "thought": ""}, "2"),
        (PROMPTS_TO_THINK, {"content": "<think>\nhm</think> 2"}, "hm</think> 2"),
        (AS_JSON, {"content": '\n"é"\n2 '}, '"\\"é\\"\\n2"'),
        (TRIMMED, {"content": " 2\n "}, "2"),
        (HERMES, {"content": "", "tool_calls": calls({"a": True}, {"a": None})}, None),
        (HERMES, {"tool_calls": calls({"a": {"b": ["c", 1, 2.5]}}, {"a": {}})}, None),
        (PYTHONIC, {"content": "So", "tool_calls": calls({"a": 'x "é"\n', "b": 2})}, None),
    ],
)
def test_n13_what_is_written_in_its_own_way_is_trained(template, message, text) -> None:
    """CASES N13."""
    trained = encode(template, **message)
    assert text is None or trained == f"{text}<|im_end|>"


def test_n13_other_formats() -> None:
    """CASES N13: calls as text are whole; the byte tokenizer has no place for thoughts."""
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "a", "tool_calls": calls({"a": 1}, {"a": 1})},
    ]
    core = byte_tokenizer()
    tokenizer = HuggingFaceTokenizer(core, tool_call_format="text")
    [sample] = samples_of(Chat(messages=messages), tokenizer)
    assert core.decode(sample.tokens[sample.mask].tolist()).count('{"a": 1}') == 2
    messages[1]["reasoning_content"] = "hm"
    with pytest.raises(BadRecord, match="leaves out reasoning_content"):
        samples_of(Chat(messages=messages), tokenizer)
    with pytest.raises(BadRecord, match=r"messages\[1\] has reasoning_content, for which the byte"):
        samples_of(Chat(messages=messages), ByteTokenizer())
    messages[1]["weight"] = 0
    messages.append({"role": "assistant", "content": "b"})
    assert len(samples_of(Chat(messages=messages), ByteTokenizer())) == 1
