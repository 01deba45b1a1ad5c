"""Where a converted checkpoint goes: a folder that is complete or absent."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_ext.upstream import checkpoint_folder as folders
from megatron_ext.weights.sources import CONFIG, TensorSource
from megatron_ext.weights.writer import TOKENIZER_FILES


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


def keep_small_files(source: TensorSource, folder: Path) -> None:
    """Write the source's config.json and tokenizer files, if it has them, to a new folder."""
    folder.mkdir()
    text = json.dumps(dict(source.config), indent=2) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")
    for name in TOKENIZER_FILES if source.location.is_dir() else ():
        if (source.location / name).is_file():
            shutil.copyfile(source.location / name, folder / name)
