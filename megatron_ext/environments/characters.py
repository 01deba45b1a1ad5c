"""A tokenizer with one token for each character of a fixed vocabulary."""

from __future__ import annotations

from collections.abc import Sequence


class CharacterTokenizer:
    """Token id = place of the character in the vocabulary."""

    def __init__(self, vocabulary: str, *, pad: str) -> None:
        if len(set(vocabulary)) != len(vocabulary) or pad not in vocabulary:
            raise ValueError(
                f"the vocabulary {vocabulary!r} must have each character once, and {pad!r}."
            )
        self.vocabulary = vocabulary
        self.pad_id = vocabulary.index(pad)
        self._ids = {character: i for i, character in enumerate(vocabulary)}
        self._characters = dict(enumerate(vocabulary))

    @property
    def size(self) -> int:
        """Number of token ids."""
        return len(self.vocabulary)

    def encode(self, text: str) -> list[int]:
        """The ids of a text's characters; `ValueError` names those without an id."""
        try:
            return [self._ids[character] for character in text]
        except KeyError:
            unknown = "".join(sorted(set(text) - self._ids.keys()))
            raise ValueError(
                f"{unknown!r} of {text[:40]!r} is not in the vocabulary {self.vocabulary!r}."
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; an id of the padded part of an embedding table reads as U+FFFD."""
        return "".join([self._characters.get(i, "\ufffd") for i in ids])
