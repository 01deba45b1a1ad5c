"""Codecs of a model's tokenizer: prompts as training has them, and what ends a response."""

from __future__ import annotations

import json

import pytest

from megatron_ext.data.hugging_face import HuggingFaceTokenizer
from megatron_ext.data.records import Chat, Completion, Text
from megatron_ext.data.samples import samples_of
from megatron_ext.data.tokenizer import END_OF_TEXT, ByteTokenizer
from megatron_ext.environments.codecs import ByteCodec, open_codec
from megatron_ext.environments.text import HuggingFaceCodec
from tests.data.tiny_tokenizer import CHATML, HERMES, byte_tokenizer

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
]


def test_a_chat_of_bytes_is_the_beginning_of_what_is_trained():
    answer = {"role": "assistant", "content": "4é"}
    (passages,) = ByteTokenizer().encode_chat(Chat(messages=[*CHAT, answer]))
    trained = [id for passage in passages for id in passage.ids]
    prompt = ByteCodec().encode(CHAT)
    assert trained[: len(prompt)] == prompt
    assert trained[len(prompt) :] == [*"4é".encode(), END_OF_TEXT]
    assert ByteCodec().decode(trained[len(prompt) :]) == "4é"
    as_chat = ByteCodec(prompts_as_messages=True)
    assert as_chat.encode("1+1?") == as_chat.encode([CHAT[1]])
    assert ByteCodec().encode("é") == list("é".encode())


def test_bytes_without_a_tokenizer():
    codec = open_codec(kind=None, model=None)
    assert isinstance(codec, ByteCodec) and codec.stop_ids == {END_OF_TEXT}
    table = codec.token_bytes()
    assert b"".join(table[id] for id in codec.encode("aé")) == "aé".encode() and len(table) == 257


@pytest.fixture
def folder(tmp_path):
    """A tokenizer without a chat template."""
    byte_tokenizer(template=None).save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_with_a_template_of_ones_own(folder, tmp_path):
    (tmp_path / "chat.jinja2").write_text(CHATML)
    for template in (CHATML, str(tmp_path / "chat.jinja2")):
        codec = open_codec(kind="HuggingFaceTokenizer", model=str(folder), chat_template=template)
        assert codec.encode(CHAT) == HuggingFaceCodec(byte_tokenizer()).encode(CHAT)
    with pytest.raises(ValueError, match=r"--chat-template nowhere\.jinja cannot be read"):
        open_codec(kind="HuggingFaceTokenizer", model=str(folder), chat_template="nowhere.jinja")


@pytest.mark.parametrize(
    ("written", "ids"), [(7, {7}), ([7, 8], {7, 8}), (None, set()), ([None], set())]
)
def test_generation_config_names_more_stop_ids(folder, written, ids):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": written}))
    codec = open_codec(kind="HuggingFaceTokenizer", model=str(folder))
    assert codec.stop_ids == ids | {byte_tokenizer().eos_token_id}


def test_config_json_names_stop_ids_where_no_generation_config_does(folder):
    """N5"""
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [250, 251]}))
    codec = open_codec(kind="HuggingFaceTokenizer", model=str(folder))
    assert codec.stop_ids == {250, 251, byte_tokenizer().eos_token_id}


def test_a_template_that_refuses_the_messages():
    template = "{{ raise_exception('only one user message') }}"
    codec = HuggingFaceCodec(byte_tokenizer(template=template))
    with pytest.raises(ValueError, match=r"the chat template refuses it \(only one"):
        codec.encode(CHAT)


@pytest.mark.parametrize(
    ("adds", "start"),
    [
        ("$0 <|im_end|>", ""),
        ("<|im_start|> $0 <|im_end|>", "<|im_start|>"),
        ("<|im_start|> <|im_start|> $0", "<|im_start|><|im_start|>"),
        ("<|im_end|> $0 <|im_end|>", "<|im_end|>"),
    ],
)
def test_n8_a_prompt_never_ends_with_what_the_tokenizer_appends(tmp_path, adds, start):
    """CASES N8: prompts, texts and chats have what it puts before a text once, and no end."""
    core = byte_tokenizer(adds=adds, template="<|im_start|>{{ messages[0].content }}")
    core.save_pretrained(tmp_path)
    codec = open_codec(kind="HuggingFaceTokenizer", model=str(tmp_path))

    def ids(text):
        return core(text, add_special_tokens=False)["input_ids"]

    assert codec.encode("hi") == ids(f"{start}hi")
    assert codec.encode("hi<|im_end|>") == ids(f"{start}hi<|im_end|>")  # as it is written
    assert codec.encode([CHAT[1]]) == ids("<|im_start|>1+1?")
    tokenizer = HuggingFaceTokenizer(core)
    assert tokenizer.start_ids == ids(start)
    [text] = samples_of(Text(text="hi"), tokenizer)
    assert text.tokens.tolist() == ids(f"{start}hi<|im_end|>")
    [completion] = samples_of(Completion(prompt="h", completion="i"), tokenizer)
    assert completion.tokens.tolist() == ids(f"{start}hi<|im_end|>")
    chat = Chat(messages=[CHAT[1], {"role": "assistant", "content": "1+1?"}])
    own = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    [talk] = samples_of(chat, HuggingFaceTokenizer(core, chat_template=own))
    assert talk.tokens.tolist() == ids("<|im_start|>1+1?<|im_start|>1+1?")


def test_n12_calls_of_earlier_turns_are_written_as_in_training():
    """CASES N12: arguments that are JSON text are decoded once, for a template that wants that."""
    core = byte_tokenizer(template=HERMES)
    call = {"function": {"name": "add", "arguments": '{"a": "é"}'}}
    asked = [CHAT[1], {"role": "assistant", "content": None, "tool_calls": [call]}, CHAT[3]]
    prompt = HuggingFaceCodec(core).encode(asked)
    assert '"arguments": {"a": "é"}}' in core.decode(prompt)
    chat = Chat(messages=[*asked, {"role": "assistant", "content": "4"}])
    [sample] = samples_of(chat, HuggingFaceTokenizer(core))
    assert sample.tokens.tolist()[: len(prompt)] == prompt
