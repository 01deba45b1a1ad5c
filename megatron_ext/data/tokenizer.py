"""What reading data needs of a tokenizer, and the tokenizer without a vocabulary: a byte a token.

Invariant the tests check: an assistant turn is trained from its first token to its end-of-turn
token, everything else is not; no token crosses the border of a turn.
Not covered: decoding.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_ext.data.records import REASONING, BadRecord, Chat
from megatron_ext.data.tool_calls import with_calls_as_text

END_OF_TEXT = 256
"""The byte tokenizer's token after a text and after every message of a chat."""
UNTRAINED = -1


@dataclass(frozen=True, kw_only=True)
class Passage:
    """Tokens of one turn of a sequence."""

    ids: list[int]
    turn: int = UNTRAINED
    """Which assistant turn of the sequence it is (0, 1, ...), or UNTRAINED."""


class Tokenizer(Protocol):
    """Text and chats to token ids."""

    @property
    def start_ids(self) -> list[int]:
        """What begins a document; often nothing."""
        ...

    @property
    def end_id(self) -> int:
        """The token that ends a document."""
        ...

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, nothing added."""
        ...

    def encode_parts(self, parts: Sequence[str]) -> list[list[int]]:
        """Tokens of each part of one text; no token lies in two parts."""
        ...

    def encode_chat(self, chat: Chat) -> list[list[Passage]]:
        """The chat as one or more sequences, which train each of its turns once.

        Raises:
            BadRecord: the chat cannot be written so that its turns are known.
        """
        ...


class ByteTokenizer:
    """UTF-8 bytes, ids 0 to 255, and END_OF_TEXT; no vocabulary to train or download.

    A message of a chat is its role on a line of its own, its content, and END_OF_TEXT:

        <|user|>
        What is 1 + 1?[256]<|assistant|>
        2[256]

    Tool calls are text of their message (`tool_calls.py`); a chat's tools come first, as JSON in a
    message of the role "tools".  Content that looks like such a line is no danger: only
    END_OF_TEXT, which no text contains, ends a message.
    """

    @property
    def start_ids(self) -> list[int]:
        """Nothing begins a document."""
        return []

    @property
    def end_id(self) -> int:
        """END_OF_TEXT."""
        return END_OF_TEXT

    def encode(self, text: str) -> list[int]:
        """UTF-8 bytes of a text."""
        return list(text.encode("utf-8"))

    def encode_parts(self, parts: Sequence[str]) -> list[list[int]]:
        """UTF-8 bytes of each part."""
        return [self.encode(part) for part in parts]

    def encode_chat(self, chat: Chat) -> list[list[Passage]]:
        """One sequence: the messages up to the last trained one.

        Raises:
            BadRecord: a message to train has thoughts, for which this format has no place.
        """
        trained = {index: turn for turn, index in enumerate(chat.trained())}
        for index in trained:
            thoughts = [k for k in REASONING if isinstance(chat.messages[index].get(k), str)]
            if thoughts:
                raise BadRecord(
                    f"messages[{index}] has {thoughts[0]}, for which the byte tokenizer has no "
                    "place: write it into the content"
                )
        passages = []
        if chat.tools:
            tools = json.dumps(chat.tools, ensure_ascii=False)
            passages.append(Passage(ids=[*self._header("tools"), *self.encode(tools), END_OF_TEXT]))
        for index, message in enumerate(with_calls_as_text(chat.messages[: max(trained) + 1])):
            content = [*self.encode(message["content"]), END_OF_TEXT]
            passages.append(Passage(ids=self._header(message["role"])))
            passages.append(Passage(ids=content, turn=trained.get(index, UNTRAINED)))
        return [passages]

    def _header(self, role: str) -> list[int]:
        return self.encode(f"<|{role}|>\n")
