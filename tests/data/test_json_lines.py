"""Any line of any file of JSON lines is read, or refused with its number, in bounded memory."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.data.config import DataConfig
from megatron_ext.data.dataset import read_dataset
from megatron_ext.data.records import parse_record
from megatron_ext.data.tokenizer import ByteTokenizer
from megatron_ext.environments.datasets import read_tasks
from megatron_ext.environments.gsm8k import read_gsm8k
from megatron_ext.rollout.prompts import read_prompts
from tests.data.hostile import REFUSED_LINES

TASK = {"prompt": "a", "answer": "b", "verifier": "exact"}
GSM8K = {"question": "a", "answer": "#### 5"}


def read_training(path: Path) -> None:
    """--train-data."""
    read_dataset(str(path), ByteTokenizer(), DataConfig(), seq_length=9, vocab_size=257)


READERS: dict[str, tuple[Callable[[Path], object], str, dict[str, str]]] = {
    "training": (read_training, "text", {"text": "abc"}),
    "tasks": (read_tasks, "prompt", TASK),
    "gsm8k": (read_gsm8k, "question", GSM8K),
    "prompts": (read_prompts, "prompt", {"prompt": "a"}),
}
"""Reader, the key of its text, and a line that is fine."""


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("case", REFUSED_LINES)
def test_n11_a_line_that_nobody_can_use_is_refused_by_number(
    case: str, reader: str, tmp_path: Path
) -> None:
    """CASES N11 and its kind: halves of surrogate pairs, numbers and nesting beyond reason."""
    read, key, good = READERS[reader]
    line, reason = REFUSED_LINES[case]
    path = tmp_path / "a.jsonl"
    whole = json.dumps(good).encode()
    path.write_bytes(b"\n".join([whole, b"", line.replace(b'"X"', f'"{key}"'.encode()), whole]))
    with pytest.raises(ValueError) as error:
        read(path)
    first = next(text for text in str(error.value).splitlines() if "line 3" in text)
    assert reason in first and len(str(error.value)) < 1000


@pytest.mark.parametrize("reader", READERS)
def test_n10_only_a_line_feed_ends_a_line_of_json(reader: str, tmp_path: Path) -> None:
    """CASES N10: U+2028 and the like may stand in a JSON text as they are; NUL is escaped."""
    read, key, good = READERS[reader]
    odd = json.dumps(good | {key: "a\u2028\u2029\u0085b\x00\U0001f600"}, ensure_ascii=False)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + f"{odd}\r\n\r\n{json.dumps(good)}".encode())
    found = read(path)
    assert found is None or len(found) == 2  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_a_long_line_is_refused_without_being_held(reader: str, tmp_path: Path) -> None:
    read, key, good = READERS[reader]
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(json.dumps(good).encode() + b"\n")
        file.write(f'{{"{key}": "'.encode())
        file.truncate(40 * 2**20)  # NULs, which take no room on the disk
        file.seek(0, 2)
        file.write(b'"}\n' + json.dumps(good).encode() + b"\nx")
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"line 2:? is longer than 16 MiB: split it") as error:
        read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "line 4" in str(error.value) and "line 3" not in str(error.value)
    assert peak < 50 * 2**20


def test_values_that_messages_repeat_are_shortened(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    large = "a" * 2**20
    for wrong in (
        {"verifier": large},
        {"verifier": [large]},
        {"answer": large, "verifier": "math"},
    ):
        path.write_text(json.dumps(TASK | wrong))
        with pytest.raises(ValueError) as error:
            read_tasks(path)
        assert len(str(error.value)) < 500
    path.write_text("\n".join([json.dumps(TASK | {"id": large})] * 2))
    with pytest.raises(ValueError, match="more than one task has the id 'aaa") as error:
        read_tasks(path)
    assert len(str(error.value)) < 500


CALLS = {
    '{"a": ': r"arguments '\{\"a\": ': the text is not JSON",
    "": "arguments '': the text is not JSON",
    '"{\\"a\\": 1}"': "JSON text of a string, not of an object, as of .* written as JSON twice",
    "[1]": "JSON text of a list, not of an object",
    "null": "JSON text of null, not of an object",
    '{"a": NaN}': "holds NaN",
    '{"a": 1, "a": 2}': "has the key 'a' twice",
    '{"a": "\\ud800"}': "half of a surrogate pair",
}


@pytest.mark.parametrize("arguments", CALLS)
def test_n12_arguments_that_are_no_object_are_a_bad_line(arguments: str, tmp_path: Path) -> None:
    """CASES N12: in training data, tasks and prompts."""
    for call in (
        {"function": {"name": "f", "arguments": arguments}},
        {"name": "f", "arguments": arguments},
    ):
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        with pytest.raises(ValueError, match=CALLS[arguments]) as error:
            parse_record(json.dumps({"messages": messages}))
        assert "messages[1].tool_calls[0]" in str(error.value)
        path = tmp_path / "a.jsonl"
        path.write_text(json.dumps({"messages": messages, "answer": "b", "verifier": "exact"}))
        for read in (read_tasks, read_prompts):
            with pytest.raises(ValueError, match=CALLS[arguments]):
                read(path)
