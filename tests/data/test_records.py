"""Lines of JSONL files: what they may be, and the reason where they cannot be used."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.data.records import BadRecord, Chat, Completion, Text, parse_record
from megatron_ext.data.samples import samples_of
from megatron_ext.data.tokenizer import ByteTokenizer

USER = {"role": "user", "content": "hi"}
REPLY = {"role": "assistant", "content": "ho"}


def test_the_three_forms() -> None:
    chat = parse_record(json.dumps({"messages": [USER, REPLY], "reward": 1.0, "tools": None}))
    assert chat == Chat(messages=[USER, REPLY])
    assert parse_record(b'{"text": "a", "id": 7}') == Text(text="a")
    completion = parse_record('{"prompt": "a", "completion": "b"}')
    assert completion == Completion(prompt="a", completion="b")


def test_messages_of_weight_0_are_context() -> None:
    left_out = {**REPLY, "weight": 0}
    chat = parse_record(json.dumps({"messages": [USER, left_out, USER, REPLY]}))
    assert isinstance(chat, Chat)
    assert chat.trained() == [3]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{'text': 1}", "is not JSON (Expecting property name enclosed in double quotes, column 2"),
        (b'{"text": "\xff"}', "is not UTF-8 (byte 11 of the line)"),
        ("[" * 100_000, "is nested deeper than 100 levels"),
        ('{"text": "\\ud800"}', "half of a surrogate pair"),
        ("[1]", "is a list, not an object"),
        ("null", "is null, not an object"),
        ('{"prompts": 1, "b": 2}', "none of the keys messages, text, or prompt and completion"),
        ('{"prompts": 1, "b": 2}', "(its keys: prompts, b)"),
        ('{"text": "a", "prompt": "b"}', "has text and prompt: keep one"),
        ('{"text": 3}', "text is a number, not text"),
        ('{"text": ""}', "text is empty"),
        ('{"prompt": "a"}', "has no completion"),
        ('{"completion": "a"}', "has no prompt"),
        ('{"prompt": ["a"], "completion": "b"}', "prompt is a list, not text"),
        ('{"messages": "a"}', "messages is a string, not a list"),
        ('{"messages": []}', "messages is empty"),
        ('{"messages": [1]}', "messages[0] is a number, not an object"),
        ('{"messages": [{"content": "a"}]}', "messages[0] has no role"),
        ('{"messages": [{"role": 1, "content": "a"}]}', "messages[0].role is not text"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no assistant message to train"),
        ('{"messages": [{"role": "user", "content": {}}]}', "content is an object, not text"),
        ('{"messages": [{"role": "user"}]}', "messages[0] has no content"),
        ('{"messages": [{"role": "assistant"}]}', "has no content and no tool_calls"),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}',
            "messages[0].tool_calls[0] names no function",
        ),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": 1}]}]}',
            "arguments that are neither an object nor text",
        ),
        (
            json.dumps({"messages": [USER, REPLY], "tools": "f"}),
            "tools is not a list of objects",
        ),
    ],
)
def test_a_bad_line_has_its_reason(line: str | bytes, reason: str) -> None:
    with pytest.raises(BadRecord) as error:
        parse_record(line)
    assert reason in str(error.value)


KEYS = st.sampled_from(
    [
        "messages",
        "text",
        "prompt",
        "completion",
        "tools",
        "role",
        "content",
        "tool_calls",
        "function",
        "name",
        "arguments",
        "weight",
        "user",
        "assistant",
        "tool",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | KEYS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=12,
)
CALL = st.fixed_dictionaries(
    {},
    optional={
        "function": st.fixed_dictionaries({}, optional={"name": KEYS | JSON, "arguments": JSON}),
        "name": KEYS | JSON,
        "arguments": JSON,
    },
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]) | JSON},
    optional={"content": st.text() | JSON, "tool_calls": st.lists(CALL | JSON, max_size=3) | JSON},
)
CHAT = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, max_size=5)}, optional={"tools": st.lists(JSON, max_size=2)}
)


@settings(max_examples=100, deadline=None)
@given(
    st.binary(max_size=30)
    | st.text(max_size=30)
    | JSON.map(json.dumps)
    | CHAT.map(json.dumps)
    | st.builds(lambda value, cut: json.dumps(value)[:cut], CHAT, st.integers(0, 80))
)
def test_any_line_is_a_record_or_has_a_reason(line: str | bytes) -> None:
    try:
        record = parse_record(line)
    except BadRecord as error:
        assert str(error)
        return
    for sample in samples_of(record, ByteTokenizer()):
        assert len(sample.tokens) == len(sample.mask)
        assert sample.mask[1:].any()
