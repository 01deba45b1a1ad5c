"""Chats through Hugging Face tokenizers: masks against hand-marked examples."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.data.hugging_face import HuggingFaceTokenizer, load_tokenizer
from megatron_ext.data.records import BadRecord, Chat, Completion, Message, Text
from megatron_ext.data.samples import samples_of
from megatron_ext.packing.batch import Sample
from tests.data.tiny_tokenizer import (
    CHATML,
    GENERATION,
    HERMES,
    REWRITING,
    byte_tokenizer,
    word_tokenizer,
)

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": "é"}'}}
AGENT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "name": "add"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "bye"},
]
TALK = [AGENT[1], {"role": "assistant", "content": "2"}, AGENT[5], AGENT[4]]


def text_of(ids: torch.Tensor, core) -> str:
    """The text of token ids."""
    return core.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def turns_of(sample: Sample, core) -> list[str]:
    """The text of every trained turn."""
    assert sample.turn_ids is not None
    assert torch.equal(sample.mask, sample.turn_ids >= 0)
    number = int(sample.turn_ids.max()) + 1
    return [text_of(sample.tokens[sample.turn_ids == turn], core) for turn in range(number)]


def test_one_token_a_role() -> None:
    """CASES D11: of system, user, assistant, tool, assistant only 2 and 4 are trained."""
    template = "{% for message in messages %}{{ message.content + ' ' }}{% endfor %}"
    core = word_tokenizer("? end s u a t b", template=template)
    contents = {"system": "s", "user": "u", "assistant": "a", "tool": "t"}
    roles = ["system", "user", "assistant", "tool", "assistant"]
    messages = [{"role": role, "content": contents[role]} for role in roles]
    [sample] = samples_of(Chat(messages=messages), HuggingFaceTokenizer(core))
    assert sample.tokens.tolist() == [2, 3, 4, 5, 4]
    assert sample.mask.tolist() == [False, False, True, False, True]
    assert sample.turn_ids is not None
    assert sample.turn_ids.tolist() == [-1, -1, 0, -1, 1]


@pytest.mark.parametrize("format", ["template", "text"])
def test_a_chat_with_tool_calls(format) -> None:
    core = byte_tokenizer(template=HERMES)
    tokenizer = HuggingFaceTokenizer(core, tool_call_format=format)
    [sample] = samples_of(Chat(messages=AGENT), tokenizer)
    call = {
        "template": '<call>{"name": "add", "arguments": {"a": "é"}}</call>',
        "text": '<tool_call>\n{"name": "add", "arguments": {"a": "é"}}\n</tool_call>',
    }[format]
    assert turns_of(sample, core) == [f"{call}<|im_end|>", "two<|im_end|>"]
    assert text_of(sample.tokens, core) == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
        f"<|im_start|>assistant\n{call}<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n"
        "<|im_start|>assistant\ntwo<|im_end|>"
    )


def test_arguments_as_text_where_the_template_prints_them() -> None:
    core = byte_tokenizer(template=HERMES.replace("arguments | tojson", "arguments"))
    [sample] = samples_of(Chat(messages=AGENT), HuggingFaceTokenizer(core))
    assert '"arguments": {"a": "é"}}' in turns_of(sample, core)[0]


def test_a_template_without_tool_calls_is_refused() -> None:
    with pytest.raises(BadRecord, match="leaves out the tool call add"):
        samples_of(Chat(messages=AGENT), HuggingFaceTokenizer(byte_tokenizer()))


def test_generation_blocks_mark_the_turns() -> None:
    core = byte_tokenizer(template=GENERATION)
    [sample] = samples_of(Chat(messages=TALK), HuggingFaceTokenizer(core))
    assert turns_of(sample, core) == ["2<|im_end|>", "two<|im_end|>"]
    [same] = samples_of(Chat(messages=TALK), HuggingFaceTokenizer(byte_tokenizer(template=CHATML)))
    assert torch.equal(sample.tokens, same.tokens)
    assert torch.equal(sample.mask, same.mask)


def test_generation_blocks_agree_with_transformers() -> None:
    core = byte_tokenizer(template=GENERATION)
    whole = core.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    [sample] = samples_of(Chat(messages=TALK), HuggingFaceTokenizer(core))
    assert sample.tokens.tolist() == whole["input_ids"][: len(sample.tokens)]
    assert sample.mask.int().tolist() == whole["assistant_masks"][: len(sample.tokens)]


def test_rewritten_thoughts_are_trained_where_they_were_thought() -> None:
    core = byte_tokenizer(template=REWRITING)
    messages = [{**m, "thought": f"hm {i}"} for i, m in enumerate(TALK)]
    samples = samples_of(Chat(messages=messages), HuggingFaceTokenizer(core))
    assert [turns_of(sample, core) for sample in samples] == [
        ["<think>hm 1</think>2<|im_end|>"],
        ["<think>hm 3</think>two<|im_end|>"],
    ]
    assert "assistant\n2<|im_end|>" in text_of(samples[1].tokens, core)


def test_a_token_never_crosses_the_border_of_a_turn() -> None:
    """The prompt ends in a new line, the answer begins with one, and two are one token."""
    core = byte_tokenizer(merges=(("Ċ", "Ċ"), ("Ġ", "y")))
    tokenizer = HuggingFaceTokenizer(core)
    newline, double = tokenizer.encode("\n"), tokenizer.encode("\n\n")
    assert len(newline) == len(double) == 1
    messages: list[Message] = [AGENT[1], {"role": "assistant", "content": "\n\n\nyes"}]
    [sample] = samples_of(Chat(messages=messages), tokenizer)
    assert turns_of(sample, core) == ["\n\n\nyes<|im_end|>"]
    start = int(sample.mask.int().argmax())
    assert sample.tokens[start - 1 : start + 2].tolist() == [*newline, *double, *newline]
    before, after = tokenizer.encode_parts(["no ", "yes"])
    assert (before, after) == (tokenizer.encode("no "), tokenizer.encode("yes"))


TEXT = st.text(st.sampled_from("ab \n\u00e9\U0001f600") | st.characters(codec="utf-8"), max_size=6)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), TEXT), max_size=6), TEXT)
def test_the_sample_is_the_text_of_the_template(turns, answer: str) -> None:
    """The trained text is exactly the assistant's, and all tokens together are the whole chat."""
    core = byte_tokenizer(merges=(("Ċ", "Ċ"), ("Ġ", "Ġ"), ("a", "b"), ("Ġ", "a")))
    messages = [{"role": role, "content": text} for role, text in [*turns, ("assistant", answer)]]
    [sample] = samples_of(Chat(messages=messages), HuggingFaceTokenizer(core))
    whole = core.apply_chat_template(messages, tokenize=False)
    assert text_of(sample.tokens, core) == whole.removesuffix("\n")
    said = [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]
    assert turns_of(sample, core) == said


def test_completions_and_texts_end_with_the_end_token() -> None:
    core = byte_tokenizer()
    tokenizer = HuggingFaceTokenizer(core)
    [sample] = samples_of(Completion(prompt="ab", completion="c"), tokenizer)
    assert text_of(sample.tokens, core) == "abc<|im_end|>"
    assert turns_of(sample, core) == ["c<|im_end|>"]
    [sample] = samples_of(Text(text="ab"), tokenizer)
    assert text_of(sample.tokens[sample.mask], core) == "b<|im_end|>"


def test_a_tokenizer_without_a_template() -> None:
    tokenizer = HuggingFaceTokenizer(byte_tokenizer(template=None))
    with pytest.raises(ValueError, match=r"has no chat template.*--chat-template"):
        samples_of(Chat(messages=TALK), tokenizer)


def test_a_template_that_refuses_the_chat() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    tokenizer = HuggingFaceTokenizer(byte_tokenizer(), chat_template=template)
    with pytest.raises(BadRecord, match=r"the chat template refuses it .*roles must alternate"):
        samples_of(Chat(messages=TALK), tokenizer)


def test_a_folder_is_loaded(tmp_path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    [loaded] = samples_of(Chat(messages=TALK), HuggingFaceTokenizer(load_tokenizer(tmp_path)))
    [expected] = samples_of(Chat(messages=TALK), HuggingFaceTokenizer(byte_tokenizer()))
    assert torch.equal(loaded.tokens, expected.tokens)


def test_a_folder_without_a_tokenizer(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"--tokenizer-model .* holds no tokenizer"):
        load_tokenizer(tmp_path)
