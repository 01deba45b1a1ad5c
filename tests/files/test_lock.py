"""R3: of several processes one holds a folder, and its death frees it."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.files.lock import hold


def in_child(action: Callable[[], object]) -> int:
    """A forked process that does this and ends; its id."""
    child = os.fork()
    if child == 0:
        try:
            action()
        finally:
            os._exit(0)
    return child


def held_by_child(path: Path) -> int:
    """A forked process that holds the lock until it is killed; its id."""
    ready, tell = os.pipe()

    def action() -> None:
        with hold(path, what="--save x"):
            os.write(tell, b"!")
            signal.pause()

    child = in_child(action)
    os.read(ready, 1)
    return child


def test_r3_a_second_process_is_refused_by_name_until_the_first_dies(tmp_path: Path):
    path = tmp_path / ".lock"
    child = held_by_child(path)
    with (
        pytest.raises(ValueError, match=r"--save y is in use by process") as raised,
        hold(path, what="--save y", patience=0),
    ):
        pass
    for word in (f"process {child} on {socket.gethostname()}", f"started {time.strftime('%Y')}"):
        assert word in str(raised.value)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with hold(path, what="--save y", patience=0):
        assert f'"pid": {os.getpid()}' in path.read_text()  # as the last act: reading frees it
    assert not path.exists()


def test_r3_a_process_is_kept_from_itself_and_the_lock_from_its_children(tmp_path: Path):
    path = tmp_path / ".lock"
    with hold(path, what="--output-dir x"):
        with pytest.raises(ValueError, match=rf"process {os.getpid()} on"), hold(path, what="y"):
            pass
        child = in_child(signal.pause)  # lives on with a copy of every descriptor
    with hold(path, what="--output-dir x", patience=0):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_r3_a_holder_that_is_ending_is_waited_for(tmp_path: Path):
    path = tmp_path / ".lock"
    child = held_by_child(path)
    killer = in_child(lambda: (time.sleep(0.3), os.kill(child, signal.SIGKILL)))
    with hold(path, what="--save x", patience=20):
        pass
    os.waitpid(child, 0)
    os.waitpid(killer, 0)
