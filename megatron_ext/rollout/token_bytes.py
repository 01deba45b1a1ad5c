"""The bytes that each token of a Hugging Face tokenizer contributes to the text.

Decoding token by token loses characters that span tokens, and decoding again and again is slow; a
table of bytes is exact and concatenates.  Invariant the tests check: the bytes of an encoded text
are the text.  Not covered: tokenizers whose decoder looks at neighbours (WordPiece).
"""

from __future__ import annotations

import json
import re
from typing import Any


def token_bytes(tokenizer: Any) -> list[bytes]:
    """One entry for each id of a fast tokenizer; special tokens give their own spelling.

    Raises:
        ValueError: the tokenizer is neither byte-level nor one with a space mark.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    description = json.loads(backend.to_str())
    kinds = _decoder_kinds(description.get("decoder") or {})
    special = {token["id"]: token["content"] for token in description.get("added_tokens", [])}
    if "ByteLevel" in kinds:
        convert = _from_byte_level
    elif kinds & {"Metaspace", "ByteFallback", "Replace"}:
        convert = _from_space_mark
    else:
        raise ValueError(
            f"the tokenizer decodes with {sorted(kinds) or 'nothing known'}: stop strings need a "
            "byte-level or SentencePiece-like one. Use stop ids."
        )
    vocabulary = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values()) + 1)
    for text, index in vocabulary.items():
        table[index] = special[index].encode() if index in special else convert(text)
    return table


def _decoder_kinds(decoder: dict[str, Any]) -> set[str]:
    kinds = {decoder["type"]} if "type" in decoder else set()
    for part in decoder.get("decoders", []):
        kinds |= _decoder_kinds(part)
    return kinds


def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes (Radford et al. 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_of_character()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _from_byte_level(text: str) -> bytes:
    if all(character in _BYTES for character in text):
        return bytes(_BYTES[character] for character in text)
    return text.encode()


def _from_space_mark(text: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(byte[1], 16)]) if byte else text.replace("\u2581", " ").encode()
