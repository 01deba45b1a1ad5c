"""Reading data files: what is skipped, what stops the run, and what the message says."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from megatron_ext.data.config import DataConfig
from megatron_ext.data.dataset import Dataset, open_tokenizer, read_dataset
from megatron_ext.data.tokenizer import ByteTokenizer

GOOD = json.dumps({"text": "abc"})
STOP, SKIP = DataConfig(), DataConfig(bad_data="skip")


def read(path: Path, config: DataConfig = STOP, **limits: int) -> Dataset:
    """The file through the byte tokenizer."""
    sizes = {"seq_length": 16, "vocab_size": 257} | limits
    return read_dataset(str(path), ByteTokenizer(), config, **sizes)


def write(path: Path, *lines: str) -> Path:
    """A JSONL file of the lines."""
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_lines_in_order(tmp_path: Path) -> None:
    lines = ["\ufeff" + GOOD, "", json.dumps({"prompt": "a", "completion": "b"}), GOOD + "\r"]
    dataset = read(write(tmp_path / "a.jsonl", *lines))
    assert [len(sample.tokens) for sample in dataset.samples] == [4, 3, 4]
    assert dataset.line_numbers == [1, 3, 4]
    assert not dataset.bad_lines


def test_unusual_line_ends_are_text(tmp_path: Path) -> None:
    """Only a new line ends a line: U+2028 may stand in a JSON string."""
    [sample] = read(write(tmp_path / "a.jsonl", '{"text": "a\u2028b"}')).samples
    assert len(sample.tokens) == len("a\u2028b".encode()) + 1


ODD = ["a\u2028b\u2029", "\fc\x0b", "d\x85e\x1c\x1d\x1ef\rg"]
"""Lines of text that hold what str.splitlines takes for the ends of lines."""


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_n10_only_a_line_feed_ends_a_line_of_text(tmp_path: Path, ends: str) -> None:
    """CASES N10: 3 lines are 3 samples, whatever ends them and whether the last one ends."""
    for mark, last in (("", ends), ("\ufeff", "")):
        path = tmp_path / "a.txt"
        path.write_bytes((mark + ends.join([*ODD[:2], " ", ODD[2]]) + last).encode())
        samples = read(path, DataConfig(text_unit="line"), seq_length=99).samples
        assert [bytes(s.tokens[:-1].tolist()).decode() for s in samples] == ODD
        [window] = read(path, seq_length=99).samples
        whole = "\n".join([*ODD[:2], " ", ODD[2]]) + last.replace("\r", "")
        assert bytes(window.tokens.tolist()).decode() == whole


def test_bad_lines_stop_with_all_their_reasons(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", GOOD, "{", *['{"messages": []}'] * 30)
    with pytest.raises(ValueError) as error:
        read(path)
    lines = str(error.value).splitlines()
    assert lines[0] == f"--train-data {path}: 31 of 32 lines cannot be used:"
    assert lines[1].startswith("  line 2 is not JSON (Expecting property name")
    assert lines[2:21] == [f"  line {number} messages is empty" for number in range(3, 22)]
    assert lines[21:] == [
        "  and 11 more",
        "Correct them, or leave them out with --bad-data skip.",
    ]


def test_bad_lines_are_skipped_and_counted(tmp_path: Path, caplog) -> None:
    path = write(tmp_path / "a.jsonl", GOOD, "{", GOOD)
    with caplog.at_level(logging.WARNING):
        dataset = read(path, SKIP)
    assert dataset.line_numbers == [1, 3]
    assert list(dataset.bad_lines) == [2]
    assert "1 lines are skipped:\n  line 2 is not JSON" in caplog.text


def test_nothing_but_bad_lines_stops_even_when_they_are_skipped(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 of 1 lines cannot be used:\n  line 1 is not JSON"):
        read(write(tmp_path / "a.jsonl", "{"), SKIP)


def test_the_identity_is_that_of_the_samples(tmp_path: Path) -> None:
    other = json.dumps({"prompt": "ab", "completion": "c"})
    one = read(write(tmp_path / "a.jsonl", GOOD, other)).identity
    assert one == read(write(tmp_path / "b.jsonl", GOOD, "", other)).identity
    changed = (
        (other, GOOD),  # the order
        (GOOD, GOOD),  # which tokens are trained
        (GOOD, other.replace("b", "d")),
        (GOOD, json.dumps({"prompt": "a", "completion": "bc"})),
        (GOOD,),
    )
    for number, lines in enumerate(changed):
        assert read(write(tmp_path / f"{number}.jsonl", *lines)).identity != one


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_an_empty_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="holds no sample of two tokens"):
        read(write(tmp_path / name, ""))


def test_long_samples_are_named_by_their_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", GOOD, json.dumps({"text": "a" * 40}))
    expected = r"1 of 2 samples are longer than 16 tokens \(lines 2; the longest has 41\)"
    with pytest.raises(ValueError, match=expected):
        read(path, longest=16)
    assert len(read(path).samples) == 2


def test_a_vocabulary_that_is_too_small(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--vocab-size 256 has no row for token id 256"):
        read(write(tmp_path / "a.jsonl", GOOD), vocab_size=256)


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=r"is not UTF-8 text \(byte 2\): convert it"):
        read(path)


def test_no_file() -> None:
    with pytest.raises(ValueError, match="--train-data is not set"):
        read_dataset(None, ByteTokenizer(), STOP, seq_length=8, vocab_size=257)


def test_a_chat_template_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--chat-template missing\.jinja cannot be read"):
        open_tokenizer(
            kind="HuggingFaceTokenizer", model=str(tmp_path), chat_template="missing.jinja"
        )


@pytest.mark.parametrize(
    ("config", "options", "problem"),
    [
        ({"train_data": "a.csv"}, {}, "--train-data a.csv ends in none of .txt, .jsonl"),
        ({"valid_data": "none.txt"}, {}, "--valid-data none.txt is not a file"),
        ({}, {"eval_interval": 5}, "--eval-interval 5 needs --valid-data"),
        ({}, {"tokenizer_model": "nowhere"}, "--tokenizer-model nowhere does not exist"),
    ],
)
def test_options_that_do_not_fit(config: dict, options: dict, problem: str) -> None:
    assert any(problem in found for found in DataConfig(**config).problems(**options))


def test_options_that_fit(tmp_path: Path) -> None:
    path = str(write(tmp_path / "a.jsonl", GOOD))
    config = DataConfig(train_data=path, valid_data=path)
    assert config.problems(tokenizer_model=str(tmp_path), eval_interval=1) == []
