"""A lock that one process holds at a time, and that dies with it, on one host or over NFS.

    with hold(folder / LOCK_NAME, what="--output-dir runs/first"):
        ...

It is a POSIX record lock (`fcntl.lockf`): the kernel, or the NFS server, drops it when its process
ends, however that happens, and forked children do not inherit it.  `flock` would live on in them.
The file names the holder and is deleted at the end; one that a killed process left is no lock.
Two things to know: POSIX locks do not keep one process from itself, so paths that are held here are
remembered; and a process loses its lock when it closes the file, so nobody may open it to read.
Invariant the tests check: of several processes one holds the lock, and its death frees it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

logger = logging.getLogger(__name__)

LOCK_NAME = ".megatron_ext.lock"
"""Name of the lock of a folder, in that folder."""
PATIENCE_SECONDS = 10.0
"""How long a holder is waited for: the ranks of a run that was killed may still be ending."""
_POLL_SECONDS = 0.2
_HELD = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

_held_here: dict[str, dict[str, object]] = {}
"""Resolved path -> what its file says (a forked child has a copy of this, but no lock)."""


@contextmanager
def hold(path: Path, *, what: str, patience: float | None = None) -> Iterator[None]:
    """Hold the lock `path` in a block.

    what: a flag and its value, for messages.
    patience: seconds that a holder is waited for; None = PATIENCE_SECONDS.

    Raises:
        ValueError: another process holds it; names its host, process id and start.
        OSError: the file cannot be created.
    """
    key = str(path.resolve())
    if key in _held_here and _held_here[key]["pid"] == os.getpid():
        raise ValueError(_refusal(what, _held_here[key]))
    owner: dict[str, object] = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    seconds = PATIENCE_SECONDS if patience is None else patience
    handle = _acquired(path, what=what, patience=seconds)
    with suppress(OSError):  # no room to say by whom
        os.truncate(handle, 0)
        os.pwrite(handle, json.dumps(owner).encode() + b"\n", 0)
    _held_here[key] = owner
    try:
        yield
    finally:
        del _held_here[key]
        with suppress(OSError):  # the folder is gone, or no longer writable
            path.unlink()
        os.close(handle)


@contextmanager
def hold_target(path: Path, *, what: str) -> Iterator[None]:
    """Hold a file or folder that does not exist yet, by a lock beside it; see `hold`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with hold(path.with_name(f".{path.name}.lock"), what=what):
        yield


def _acquired(path: Path, *, what: str, patience: float) -> int:
    """A descriptor of the locked file, which has the name `path`."""
    deadline = time.monotonic() + patience
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if _lock(handle, what) and _has_name(handle, path):
                return handle
            holder = _holder(handle)
        except OSError:
            os.close(handle)
            raise
        os.close(handle)
        if time.monotonic() >= deadline:
            raise ValueError(_refusal(what, holder))
        time.sleep(_POLL_SECONDS)


def _lock(handle: int, what: str) -> bool:
    """Whether the lock was free; True with a warning where the file system has no locks."""
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            logger.warning(
                "%s: its file system has no locks (%s), so a second run in it is not noticed",
                what,
                error.strerror,
            )
            return True
        if error.errno not in _HELD:
            raise
        return False
    return True


def _has_name(handle: int, path: Path) -> bool:
    """Whether the open file is the one at `path`: a holder that ends deletes its file."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _holder(handle: int) -> dict[str, object]:
    """What the file says of its holder; empty while it is being written."""
    try:
        found = json.loads(os.pread(handle, 4096, 0))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _refusal(what: str, holder: dict[str, object]) -> str:
    who = "another process"
    if holder:
        who = (
            f"process {holder.get('pid')} on {holder.get('host')}, started {holder.get('started')}"
        )
    return (
        f"{what} is in use by {who}: two would destroy each other's files. Wait until it ends, "
        "end it, or name another folder."
    )
