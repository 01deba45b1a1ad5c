"""The samples of a data file, read and tokenised once, before training.

Every rank reads the whole file and gets the same samples in the same order.
Invariant the tests check: any file gives samples, or one ValueError that lists what is wrong.
Not covered: files larger than memory.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tqdm import tqdm

from megatron_ext.data.config import BYTE_TOKENIZER_TYPES, DataConfig, ToolCallFormat
from megatron_ext.data.json_lines import BadRecord, numbered_lines
from megatron_ext.data.records import parse_record
from megatron_ext.data.samples import samples_of, samples_of_text
from megatron_ext.data.tokenizer import ByteTokenizer, Tokenizer
from megatron_ext.data.tokenizer_files import read_template
from megatron_ext.packing.batch import Sample

logger = logging.getLogger(__name__)

NUM_LISTED = 20
"""Most lines that a message lists."""


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Samples in file order."""

    samples: Sequence[Sample]
    line_numbers: list[int]
    """Line of the file (from 1) that each sample comes from; empty for a .txt file."""
    bad_lines: dict[int, str] = field(default_factory=dict)
    """Lines that were skipped, and why."""

    name: str = ""
    """What identifies samples that are drawn, not stored; empty = their contents."""

    @cached_property
    def identity(self) -> str:
        """Number of samples and a hash of their tokens and masks, in order.

        Equal for equal samples wherever they are stored, so that a resumed run knows them again.
        """
        if self.name:
            return self.name
        digest = hashlib.sha256()
        for sample in self.samples:
            digest.update(len(sample.tokens).to_bytes(8))
            digest.update(sample.tokens.numpy().tobytes())
            digest.update(sample.mask.numpy().tobytes())
        return f"{len(self.samples)} samples, sha256 {digest.hexdigest()[:12]}"


def open_tokenizer(
    *,
    kind: str | None,
    model: str | None = None,
    chat_template: str | None = None,
    tool_call_format: ToolCallFormat = "template",
) -> Tokenizer:
    """The tokenizer of Megatron's --tokenizer-type, --tokenizer-model and --chat-template.

    chat_template: a Jinja template or the path of one; None = the tokenizer's own.
    """
    if kind in BYTE_TOKENIZER_TYPES:
        return ByteTokenizer()
    # transformers takes seconds to import: only where it is used
    from megatron_ext.data.hugging_face import HuggingFaceTokenizer, load_tokenizer

    assert model is not None, "checked with the options"
    template = read_template(chat_template)
    return HuggingFaceTokenizer(
        load_tokenizer(model), **template, tool_call_format=tool_call_format
    )


def read_dataset(
    path: str | None,
    tokenizer: Tokenizer,
    config: DataConfig,
    *,
    seq_length: int,
    vocab_size: int,
    longest: int | None = None,
    flag: str = "--train-data",
    is_reporter: bool = True,
) -> Dataset:
    """The samples of a .txt or .jsonl file.

    longest: most tokens of a sample, None = any (packing cuts or drops them).
    flag: the option that named the file, for messages.  is_reporter: shows progress and warnings.

    Raises:
        ValueError: no file was named, it cannot be read, lines of it are bad and are not to be
            skipped, samples are too long, or nothing is left; with all reasons in one message.
    """
    if path is None:
        raise ValueError(f"{flag} is not set: name the file.")
    if path.endswith(".jsonl"):
        dataset = _read_jsonl(path, tokenizer, config, flag=flag, is_reporter=is_reporter)
    else:
        text = read_text(path, flag=flag)
        samples = samples_of_text(text, tokenizer, unit=config.text_unit, seq_length=seq_length)
        dataset = Dataset(samples=samples, line_numbers=[])
    if not dataset.samples:
        raise ValueError(f"{flag} {path} holds no sample of two tokens: give more text.")
    _check_vocabulary(dataset, vocab_size=vocab_size)
    if longest is not None:
        _check_lengths(dataset, longest=longest, name=f"{flag} {path}")
    return dataset


def read_text(path: str | Path, *, flag: str) -> str:
    """A text file: UTF-8, with or without a byte order mark; "\\r\\n" ends a line as "\\n" does.

    Raises:
        ValueError: it cannot be read; names the flag.
    """
    try:
        return Path(path).read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be read: {error}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{flag} {path} is not UTF-8 text (byte {error.start}): convert it."
        ) from error


def _read_jsonl(
    path: str, tokenizer: Tokenizer, config: DataConfig, *, flag: str, is_reporter: bool
) -> Dataset:
    samples: list[Sample] = []
    line_numbers: list[int] = []
    bad: dict[int, str] = {}
    num_records = num_split = 0
    # disable=None shows a bar on a terminal only, delay only for files that take a while
    hidden = None if is_reporter else True
    lines = numbered_lines(path)
    with tqdm(lines, desc=f"reading {path}", unit="line", delay=2, disable=hidden) as shown:
        for number, line in shown:
            num_records += 1
            try:
                found = samples_of(parse_record(line), tokenizer)
            except BadRecord as error:
                bad[number] = str(error)
                continue
            num_split += len(found) > 1
            samples += found
            line_numbers += [number] * len(found)
    if bad and (config.bad_data == "stop" or not samples):
        raise ValueError(
            f"{flag} {path}: {len(bad)} of {num_records} lines cannot be used:\n  "
            + "\n  ".join(_listed(bad))
            + "\nCorrect them, or leave them out with --bad-data skip."
        )
    if bad and is_reporter:
        text = "\n  ".join(_listed(bad))
        logger.warning("%s %s: %d lines are skipped:\n  %s", flag, path, len(bad), text)
    if num_split and is_reporter:
        logger.warning(
            "%s %s: the chat template rewrites earlier turns, so that %d chats became %d samples "
            "(each turn after the prompt it was generated from).",
            flag,
            path,
            num_records - len(bad),
            len(samples),
        )
    return Dataset(samples=samples, line_numbers=line_numbers, bad_lines=bad)


def _listed(reasons: dict[int, str]) -> list[str]:
    lines = [f"line {number} {reason}" for number, reason in reasons.items()]
    left = len(lines) - NUM_LISTED
    return lines[:NUM_LISTED] + ([f"and {left} more"] if left > 0 else [])


def _check_vocabulary(dataset: Dataset, *, vocab_size: int) -> None:
    largest = max(int(sample.tokens.max()) for sample in dataset.samples)
    if largest >= vocab_size:
        raise ValueError(
            f"--vocab-size {vocab_size} has no row for token id {largest} of the data: use the "
            f"vocabulary size of the tokenizer, at least {largest + 1}."
        )


def _check_lengths(dataset: Dataset, *, longest: int, name: str) -> None:
    lengths = [len(sample.tokens) for sample in dataset.samples]
    over = [i for i, length in enumerate(lengths) if length > longest]
    if over:
        where = _line_of(dataset, over)
        raise ValueError(
            f"{name}: {len(over)} of {len(lengths)} samples are longer than {longest} tokens "
            f"({where}; the longest has {max(lengths)}). Raise --seq-length (and "
            "--max-tokens-per-microbatch), or choose --overlong truncate or drop."
        )


def _line_of(dataset: Dataset, indices: Sequence[int]) -> str:
    if not dataset.line_numbers:
        return f"the first is sample {indices[0]}"
    lines = sorted({dataset.line_numbers[i] for i in indices})
    more = f" and {len(lines) - NUM_LISTED} more" if len(lines) > NUM_LISTED else ""
    return f"lines {', '.join(map(str, lines[:NUM_LISTED]))}{more}"
