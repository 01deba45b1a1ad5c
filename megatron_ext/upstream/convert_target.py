"""A conversion, and where its output goes: a folder that is complete or absent."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.data.hugging_face import load_tokenizer
from megatron_ext.upstream import checkpoint_folder as folders
from megatron_ext.weights.sources import TensorInfo
from megatron_ext.weights.stop_ids import GENERATION_CONFIG, stop_ids_of
from megatron_ext.weights.weight_files import CONFIG
from megatron_ext.weights.writer import TOKENIZER_FILES

logger = logging.getLogger(__name__)

HF_FOLDER = "hf"
"""Beside the weights of a converted checkpoint: its config.json and tokenizer, for the way back."""
Progress = Callable[[int], object]
"""Called with the bytes of each parameter that is written."""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What will be written, and how; nothing is before ``run``."""

    tensors: Mapping[str, TensorInfo]
    """Of the output, in the order they are written."""
    run: Callable[[Progress], None]

    @property
    def num_bytes(self) -> int:
        """Bytes of all values."""
        return sum(info.num_bytes for info in self.tensors.values())


def is_hf(path: Path) -> bool:
    """Whether a path is a Hugging Face directory or a file of weights."""
    return path.suffix in (".gguf", ".safetensors") or (path / CONFIG).is_file()


@contextmanager
def in_place(target: Path) -> Iterator[Path]:
    """A new folder that gets the target's name at the end, and is removed after an error."""
    partial = None
    try:
        partial = folders.begin(target)
        yield partial
        if target.is_dir():
            target.rmdir()
        partial.rename(target)
        os.sync()
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "Free some space" if is_full else "Check the path and its permissions"
        raise ValueError(
            f"{target} cannot be written ({error.strerror}): nothing is left of it. {remedy}, or "
            "give another folder."
        ) from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def check_target(target: Path, *, num_bytes: int) -> None:
    """Raise ValueError if the target exists, or the disk has not the space."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not empty. Give another folder, or delete it.")
    parent = next(path for path in target.absolute().parents if path.exists())
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise ValueError(
            f"{target} needs {num_bytes / 1e9:.2f} GB and {parent} has {free / 1e9:.2f} GB free. "
            "Free some space, or give a folder on another disk."
        )


def keep_small_files(source: Path, folder: Path, *, config: Mapping[str, Any]) -> None:
    """Write a config.json, and a source folder's tokenizer files, to a new folder."""
    folder.mkdir()
    text = json.dumps(dict(config), indent=2) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")
    for name in TOKENIZER_FILES if source.is_dir() else ():
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


@contextmanager
def small_files(source: Path) -> Iterator[Path]:
    """A folder with the tokenizer's files of a source; a GGUF file's are made from it.

    A GGUF file without a tokenizer that transformers can read gives none, with a warning.
    """
    if source.suffix != ".gguf":
        yield source if source.is_dir() else source.parent
        return
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        try:
            load_tokenizer(source).save_pretrained(folder)
        except ValueError as error:
            logger.warning("no tokenizer is written: %s", error)
        if ids := sorted(stop_ids_of(source)):
            text = json.dumps({"eos_token_id": ids}, indent=2) + "\n"
            (folder / GENERATION_CONFIG).write_text(text, encoding="utf-8")
        yield folder
