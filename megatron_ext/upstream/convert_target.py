"""Where a converted checkpoint goes: a folder that is complete or absent."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_ext.upstream import checkpoint_folder as folders


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
