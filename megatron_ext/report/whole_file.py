"""A file that is complete or, after an error or a kill, as it was before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from uuid import uuid4


def check_writable(path: Path, *, flag: str) -> None:
    """Raise `ValueError` if no file can be written there: worth knowing before the work."""
    folder = path.absolute().parent
    if path.is_dir():
        raise ValueError(f"{flag} {path} is a folder: name a file.")
    if not folder.is_dir():
        raise ValueError(f"{flag} {path}: there is no folder {folder}. Create it, or name another.")
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"{flag} {path}: {folder} cannot be written to ({error.strerror}). Name another folder."
        ) from error


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write a file that gets the name `path` at the end, and is removed after an error."""
    partial = path.with_name(f".{path.name}.{os.getpid()}-{uuid4().hex[:8]}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
