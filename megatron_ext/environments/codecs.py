"""The codec of a model's tokenizer: what --tokenizer-type and --tokenizer-model name.

Invariant the tests check: ids of a chat are those that training on this chat begins with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from megatron_ext.data.config import BYTE_TOKENIZER_TYPES
from megatron_ext.data.records import Chat
from megatron_ext.data.tokenizer import END_OF_TEXT, ByteTokenizer
from megatron_ext.data.tokenizer_files import read_template
from megatron_ext.environments.text import HuggingFaceCodec, Message, TextCodec
from megatron_ext.weights.stop_ids import stop_ids_of


class ModelCodec(TextCodec, Protocol):
    """A codec that also knows what each token contributes to the text."""

    def token_bytes(self) -> list[bytes]:
        """One entry for each id; for stop strings (`rollout.engine.RolloutEngine`)."""
        ...


class ByteCodec:
    """UTF-8 bytes and END_OF_TEXT, texts and chats as `data.tokenizer.ByteTokenizer` has them."""

    stop_ids = frozenset({END_OF_TEXT})

    def __init__(self, *, prompts_as_messages: bool = False) -> None:
        self._prompts_as_messages = prompts_as_messages
        self._tokenizer = ByteTokenizer()

    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """Bytes of a plain prompt, or of a chat up to the answer."""
        if isinstance(prompt, str) and not self._prompts_as_messages:
            return self._tokenizer.encode(prompt)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        answered = [*(dict(m) for m in messages), {"role": "assistant", "content": ""}]
        (passages,) = self._tokenizer.encode_chat(Chat(messages=answered, tools=None))
        return [id for passage in passages[:-1] for id in passage.ids]

    def decode(self, ids: Sequence[int]) -> str:
        """The text; bytes that are none read as U+FFFD."""
        return bytes(id for id in ids if id < END_OF_TEXT).decode("utf-8", errors="replace")

    def token_bytes(self) -> list[bytes]:
        """A byte for each id, nothing for END_OF_TEXT."""
        return [*(bytes([byte]) for byte in range(256)), b""]


def open_codec(
    *,
    kind: str | None,
    model: str | None,
    checkpoint: str | None = None,
    more_stop_ids: Iterable[int] = (),
    chat_template: str | None = None,
    prompts_as_messages: bool = False,
) -> ModelCodec:
    """The codec of a run; the arguments are values of Megatron's flags and of ours.

    kind: --tokenizer-type; None = bytes.
    model: --tokenizer-model.
    checkpoint: --hf-model; it, or else the tokenizer's folder, may name more ids that end a
    response, as may more_stop_ids, of the checkpoint that is loaded.
    chat_template: --chat-template, a Jinja template or the path of one; None = the tokenizer's own.

    Raises:
        ValueError: there is no usable tokenizer or template.
    """
    if kind in BYTE_TOKENIZER_TYPES:
        return ByteCodec(prompts_as_messages=prompts_as_messages)
    # transformers takes seconds to import: only where it is used
    from megatron_ext.data.hugging_face import load_tokenizer

    assert model is not None, "checked with the options"
    return HuggingFaceCodec(
        load_tokenizer(model),
        **read_template(chat_template),
        prompts_as_messages=prompts_as_messages,
        more_stop_ids=stop_ids_of(Path(checkpoint or model)).union(more_stop_ids),
    )
