"""A file that grows by whole pieces (lines, records), each there or absent, whatever the disk does.

Invariant the tests check: after a disk was full, at any byte, the file ends with a whole piece.
"""

from __future__ import annotations

import os
from pathlib import Path


class AppendedFile:
    """Appends pieces; each is with the system when `append` returns, whatever kills the process."""

    def __init__(self, path: Path) -> None:
        """A file that is continued if it exists, and created by the first piece."""
        self.path = path
        self._whole: int | None = None
        """Bytes of whole pieces, where an unfinished one may follow them."""

    def append(self, piece: bytes) -> None:
        """Append a piece.

        Raises:
            OSError: the file does not take it; what was written of it is taken back.
        """
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            if self._whole is not None:
                self._cut(handle, self._whole)
            size = self._whole = os.fstat(handle).st_size
            try:
                while piece:
                    piece = piece[os.write(handle, piece) :]
            except OSError:
                self._cut(handle, size)
                raise
            self._whole = None
        finally:
            os.close(handle)

    def _cut(self, handle: int, size: int) -> None:
        if os.fstat(handle).st_size > size:
            os.ftruncate(handle, size)
        self._whole = None
