"""R3: a rank whose launcher was killed ends by itself, in a call that never returns, too."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

from megatron_ext.upstream.orphans import tied_to_launcher


def rank_and_its_launcher(log: Path, env: dict[str, str]) -> tuple[int, int]:
    """The id of a launcher with one rank, which hangs; and what becomes readable when both end."""
    ended, alive = os.pipe()
    ready, tell = os.pipe()
    launcher = os.fork()
    if launcher == 0:
        if os.fork() == 0:
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
            os.environ.update(env)
            with tied_to_launcher():
                os.write(tell, b"!")
                os.read(ended, 1)  # in the kernel, for ever: this process holds the other end
        signal.pause()
    os.close(alive)
    os.read(ready, 1)
    return launcher, ended


def test_r3_a_rank_ends_after_its_launcher(tmp_path: Path) -> None:
    launcher, ended = rank_and_its_launcher(tmp_path / "log", {"TORCHELASTIC_RUN_ID": "x"})
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    assert select.select([ended], [], [], 10)[0], "the rank lives on"
    assert f"torchrun (process {launcher}) is gone" in (tmp_path / "log").read_text()
