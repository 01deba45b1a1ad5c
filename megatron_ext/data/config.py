"""Options of the training data.

No `from __future__ import annotations`: Megatron's ArgumentGroupFactory needs the field types
themselves.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

TextUnit = Literal["window", "line"]
BadData = Literal["stop", "skip"]
ToolCallFormat = Literal["template", "text"]

SUFFIXES = (".txt", ".jsonl")
DEMONSTRATIONS = "arithmetic-demonstrations"
"""Name of the built-in data: demonstrations of the built-in tasks."""
BYTE_TOKENIZER_TYPES = (None, "NullTokenizer")
"""Megatron's --tokenizer-type of a run whose tokens are bytes."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is trained on."""

    train_data: str | None = None
    """File to train on. A .txt file is UTF-8 text, of which a byte order mark is left out and
    CR LF counts as LF. A .jsonl file has one JSON object a line:
    messages (a chat; only assistant turns are trained), text (all trained), or prompt and
    completion (only the completion is trained); other keys are left alone. The word
    arithmetic-demonstrations stands for demonstrations of the built-in tasks (--tasks arithmetic),
    drawn by --task-seed, with the vocabulary of these tasks."""

    valid_data: str | None = None
    """File of the same form whose loss is measured, whole, every --eval-interval steps and after
    the last one. Unset = no validation."""

    text_unit: TextUnit = "window"
    """What one sample of a .txt file is: a window of --seq-length tokens, or one line (samples of
    different lengths, cut at --seq-length). Only LF or CR LF ends a line, and blank lines are left
    out."""

    bad_data: BadData = "stop"
    """What happens to lines of a .jsonl file that cannot be used: stop before training and list
    them with their reasons, or skip them and count them in the metrics."""

    tool_call_format: ToolCallFormat = "template"
    """Who writes an assistant's tool_calls: the chat template, or we, as <tool_call> JSON in the
    text of the message, for templates that know no tool calls. The byte tokenizer always does the
    latter."""

    def problems(
        self,
        *,
        tokenizer_model: str | None = None,
        eval_interval: int | None = None,
        seq_length: int | None = None,
    ) -> list[str]:
        """Every mismatch as one sentence with its remedy; the arguments are Megatron's options."""
        found = []
        for flag, path in (("--train-data", self.train_data), ("--valid-data", self.valid_data)):
            if path is None or (flag == "--train-data" and path == DEMONSTRATIONS):
                continue
            if Path(path).is_dir():
                found.append(f"{flag} {path} is a folder: name a file.")
            elif Path(path).suffix not in SUFFIXES:
                found.append(f"{flag} {path} ends in none of {', '.join(SUFFIXES)}: rename it.")
            elif not Path(path).is_file():
                found.append(f"{flag} {path} is not a file: check the path.")
        if seq_length == 1 and self.train_data is not None:
            found.append("--seq-length 1: a sample is trained from its second token on. Use more.")
        if eval_interval is not None and self.valid_data is None:
            found.append(f"--eval-interval {eval_interval} needs --valid-data.")
        if tokenizer_model is not None and not Path(tokenizer_model).exists():
            found.append(
                f"--tokenizer-model {tokenizer_model} does not exist: give the folder of a Hugging "
                "Face tokenizer, or a GGUF file (nothing is downloaded)."
            )
        return found
