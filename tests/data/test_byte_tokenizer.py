"""The byte tokenizer's chats: assistant turns and their END_OF_TEXT are trained, nothing else."""

from __future__ import annotations

import torch

from megatron_ext.data.records import Chat, Completion, Text
from megatron_ext.data.samples import samples_of, samples_of_text
from megatron_ext.data.tokenizer import END_OF_TEXT, ByteTokenizer
from megatron_ext.packing.batch import Sample

CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
AGENT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "1 + é?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "name": "add"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "bye"},
]


def text_of(ids: torch.Tensor) -> str:
    """The bytes as text, END_OF_TEXT as a full stop in a circle."""
    return b"".join(
        "⊙".encode() if id == END_OF_TEXT else bytes([id]) for id in ids.tolist()
    ).decode()


def turns_of(sample: Sample) -> list[str]:
    """The text of every turn."""
    assert sample.turn_ids is not None
    number = int(sample.turn_ids.max()) + 1
    return [text_of(sample.tokens[sample.turn_ids == turn]) for turn in range(number)]


def test_a_chat_with_tool_calls() -> None:
    [sample] = samples_of(Chat(messages=AGENT), ByteTokenizer())
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert text_of(sample.tokens) == (
        f"<|system|>\nbe kind⊙<|user|>\n1 + é?⊙<|assistant|>\n{call}⊙<|tool|>\n2⊙"
        "<|assistant|>\ntwo⊙"  # what follows the last turn trains nothing
    )
    assert turns_of(sample) == [f"{call}⊙", "two⊙"]
    assert torch.equal(sample.mask, sample.turn_ids >= 0)


def test_a_turn_of_weight_0_is_not_trained() -> None:
    messages = [*AGENT[:2], {"role": "assistant", "content": "no", "weight": 0}, *AGENT[1:2]]
    [sample] = samples_of(Chat(messages=[*messages, AGENT[4]]), ByteTokenizer())
    assert turns_of(sample) == ["two⊙"]
    assert "<|assistant|>\nno⊙" in text_of(sample.tokens)


def test_tools_come_first() -> None:
    [sample] = samples_of(Chat(messages=AGENT[1:5], tools=[{"name": "add"}]), ByteTokenizer())
    assert text_of(sample.tokens).startswith('<|tools|>\n[{"name": "add"}]⊙<|user|>\n')
    assert len(turns_of(sample)) == 2


def test_text_is_trained_but_for_its_first_token() -> None:
    [sample] = samples_of(Text(text="ab"), ByteTokenizer())
    assert sample.tokens.tolist() == [97, 98, END_OF_TEXT]
    assert sample.mask.tolist() == [False, True, True]


def test_only_the_completion_is_trained() -> None:
    [sample] = samples_of(Completion(prompt="ab", completion="c"), ByteTokenizer())
    assert sample.tokens.tolist() == [97, 98, 99, END_OF_TEXT]
    assert sample.mask.tolist() == [False, False, True, True]


def test_windows_predict_each_byte_once() -> None:
    text = "abcdefgh"
    samples = samples_of_text(text, ByteTokenizer(), unit="window", seq_length=4)
    predicted = [id for s in samples for id in s.tokens[s.mask].tolist()]
    assert bytes(predicted).decode() == text[1:]
    assert all(len(sample.tokens) <= 4 for sample in samples)


def test_lines_end_with_the_end_of_text() -> None:
    samples = samples_of_text("ab\n\ncde\n", ByteTokenizer(), unit="line", seq_length=4)
    assert [text_of(sample.tokens) for sample in samples] == ["ab⊙", "cde⊙"]
    samples = samples_of_text("abcde\n", ByteTokenizer(), unit="line", seq_length=4)
    assert [text_of(sample.tokens) for sample in samples] == ["abcd"]
