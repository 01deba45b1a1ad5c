"""Stop strings and characters that span tokens, and the bytes of tokens."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_ext.rollout.stops import StopMatcher
from megatron_ext.rollout.token_bytes import token_bytes

TEXTS = ["Hello world, hello there!", "naïve café \U0001f680 日本語", "a  b\n\tc </s> end"]
TABLE = [b"ab", b"c", b"</", b"s", b">", "\U0001f680".encode()[:2], "\U0001f680".encode()[2:], b""]


def first_stop(tokens: list[int], *, strings: list[str], ids: set[int] = frozenset()) -> tuple:
    """How many tokens until the end, and what ended it."""
    matcher = StopMatcher(stop_ids=frozenset(ids), stop_strings=strings, token_bytes=TABLE)
    for count, token in enumerate(tokens, start=1):
        if matcher.met(token):
            return count, matcher.matched
    return len(tokens), None


@pytest.mark.parametrize(
    ("tokens", "strings", "expected"),
    [
        ([0, 2, 3, 4, 1], ["</s>"], (4, "</s>")),
        ([0, 1, 0, 1], ["bca"], (3, "bca")),
        ([0, 0, 0], ["abab", "ba"], (2, "ba")),
        ([1, 5, 6, 0], ["\U0001f680"], (3, "\U0001f680")),
        ([5, 1], ["\U0001f680"], (2, None)),
        ([2, 7, 7, 3, 4], ["</s>"], (5, "</s>")),
        ([0, 1], ["abcd"], (2, None)),
        ([0, 1], ["a"], (1, "a")),
    ],
)
def test_stop_strings_span_tokens(tokens, strings, expected):
    assert first_stop(tokens, strings=strings) == expected


def test_stop_id_comes_first():
    assert first_stop([1, 4], strings=[">"], ids={4}) == (2, 4)


def test_a_new_turn_forgets_the_last_one():
    matcher = StopMatcher(stop_ids=frozenset(), stop_strings=["</s>"], token_bytes=TABLE)
    assert not matcher.met(2)
    matcher.reset()
    assert not matcher.met(3) and not matcher.met(4)


def test_strings_without_bytes_are_refused():
    with pytest.raises(ValueError, match="token_bytes"):
        StopMatcher(stop_ids=frozenset(), stop_strings=["x"], token_bytes=None)


def byte_level() -> Tokenizer:
    """GPT-2's kind, trained on almost nothing, so most characters are several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def space_mark() -> Tokenizer:
    """SentencePiece's kind with byte fallback."""
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for piece in ("\u2581", "\u2581a", "b", "c"):
        vocabulary[piece] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, space_mark])
@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_the_tokens_are_the_text(make, text):
    tokenizer = make()
    table = token_bytes(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert b"".join(table[i] for i in ids).decode() == text


def test_unknown_decoders_are_refused():
    with pytest.raises(ValueError, match="Use stop ids"):
        token_bytes(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
