"""Faults at random moments: each starts a run, harms it, and looks at how the run takes it."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tools.soaking.jobs import Job, Running, is_alive, run_to_end

ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True)
class Harm:
    """One fault."""

    job: Job
    folder: Path
    draw: random.Random
    seconds: float
    """What a run of this job takes when it is left alone."""

    def start(self) -> Running:
        """The run that will be harmed."""
        return Running(self.job, self.folder)

    def moment(self, running: Running) -> None:
        """Wait for a random moment of its life."""
        running.wait(self.draw.uniform(0.0, self.seconds))


def signal_to_launcher(harm: Harm) -> list[str]:
    """TERM, INT or HUP, as a queue or a terminal sends it."""
    running = harm.start()
    harm.moment(running)
    number = harm.draw.choice(ASKED)
    return _signalled(running, [running.launcher], number)


def signal_to_one_rank(harm: Harm) -> list[str]:
    """TERM, INT or HUP to one rank only: the others have to hear of it."""
    running = harm.start()
    harm.moment(running)
    return _signalled(running, [harm.draw.choice(running.ranks)], harm.draw.choice(ASKED))


def kill_one_rank(harm: Harm) -> list[str]:
    """SIGKILL to one rank."""
    running = harm.start()
    harm.moment(running)
    was_running = _send(harm.draw.choice(running.ranks), signal.SIGKILL)
    code = running.wait()
    return [] if code or not was_running else ["a killed rank ends as if all were well"]


def kill_launcher(harm: Harm) -> list[str]:
    """SIGKILL to the launcher alone: its ranks have to end by themselves, and say so."""
    running = harm.start()
    harm.moment(running)
    _send(running.launcher, signal.SIGKILL)
    running.wait()
    wrong = [] if running.ranks_end() else ["ranks outlive their launcher"]
    running.end()
    return wrong


def kill_all(harm: Harm) -> list[str]:
    """A power cut: SIGKILL to everything at once."""
    running = harm.start()
    harm.moment(running)
    for pid in (running.launcher, *running.ranks):
        _send(pid, signal.SIGKILL)
    running.wait()
    return []


def full_disk(harm: Harm) -> list[str]:
    """From some moment on no file may grow beyond some size; perhaps there is room later."""
    running = harm.start()
    harm.moment(running)
    size = int(10 ** harm.draw.uniform(0, 5.5))
    _limit(running, size)
    if harm.draw.random() < 0.5:
        running.wait(harm.draw.uniform(0.0, harm.seconds))
        _limit(running, resource.RLIM_INFINITY)
    code, said = running.wait(), running.said()
    if code is None:
        running.end()
        return ["hangs on a full disk"]
    if code and not re.search(r"--save \S+|--output-dir \S+|is gone", said):
        return [f"exit code {code} and no word of --save or --output-dir: {said[-600:]}"]
    if (
        not code
        and not _has_all_metrics(harm)
        and "the record of this run is incomplete" not in said
    ):
        return ["metrics are missing and nothing was said"]
    return []


def damaged_shard(harm: Harm) -> list[str]:
    """A file of the newest checkpoint is flipped at a byte, cut, emptied or deleted."""
    running = Running(harm.job, harm.folder, "--exit-interval", str(harm.draw.choice((3, 4, 5))))
    running.wait()
    newest = max((harm.folder / "saved").glob("iter_???????"))
    path = harm.draw.choice([p for p in sorted(newest.iterdir()) if p.stat().st_size])
    what = harm.draw.choice((_flip, _cut, _empty, _delete))
    what(path, harm.draw)
    resumed = run_to_end(harm.job, harm.folder)
    said = resumed.said()
    is_named = newest.name in said or re.search(rf"step {int(newest.name[5:])}\b", said)
    if not is_named:
        return [f"{path.name} of {newest.name}: damage ({what.__name__}) without a word"]
    if resumed.code:  # it was refused by name: the remedy is to take the damaged one away
        shutil.rmtree(newest, ignore_errors=True)
    return []


def two_runs(harm: Harm) -> list[str]:
    """A second run in the same folders, at a random moment of the first."""
    first = harm.start()
    harm.moment(first)
    was_running = first.wait(0) is None
    second = Running(harm.job, harm.folder)
    code, _ = second.wait(), first.wait()
    said = second.said()
    wrong = [
        f"the {name} run ended with {ended}"
        for name, ended in (("first", first.code), ("second", code))
        if ended not in (0, 2)
    ]
    if first.code == code == 2:
        wrong.append("each run refused the other")
    for name, refused, other in (("first", first, second), ("second", second, first)):
        if refused.code == 2 and f"is in use by process {other.ranks[0]} on " not in refused.said():
            wrong.append(f"the {name} run was refused without the other one's process")
    if not was_running and code == 2 and "in use" in said:
        wrong.append("the lock of a run outlives it")
    return wrong


FAULTS: dict[str, Callable[[Harm], list[str]]] = {
    function.__name__: function
    for function in (
        signal_to_launcher,
        signal_to_one_rank,
        kill_one_rank,
        kill_launcher,
        kill_all,
        full_disk,
        damaged_shard,
        two_runs,
    )
}
"""Kind -> what it does; the answer is what was wrong with how the run took it."""


def _signalled(running: Running, pids: list[int], number: int) -> list[str]:
    for pid in pids:
        _send(pid, number)
    code = running.wait()
    if code is None:
        running.end()
        return [f"{signal.Signals(number).name} does not end the run"]
    if code not in (0, number, 128 + number):
        return [f"exit code {code} after {signal.Signals(number).name}"]
    if code == 128 + number:
        record = json.loads((running.folder / "out" / "config.json").read_text())
        name = signal.Signals(number).name
        if record["status"] != "stopped" or not record["reason"].startswith(f"{name} came"):
            return [f"the record says {record['status']}: {record['reason']!r} after {name}"]
    return []


def _send(pid: int, number: int) -> bool:
    """Whether there was a process, not one that has ended already, to send the signal to."""
    was_alive = is_alive(pid)
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return was_alive


def _limit(running: Running, size: int) -> None:
    for pid in running.ranks:
        try:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        except ProcessLookupError:
            continue


def _has_all_metrics(harm: Harm) -> bool:
    path = harm.folder / "out" / "metrics.jsonl"
    steps = {json.loads(line)["step"] for line in path.read_text().splitlines()}
    return set(range(1, max(steps, default=0) + 1)) <= steps and bool(steps)


def _flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def _cut(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def _delete(path: Path, draw: random.Random) -> None:
    path.unlink()


def _empty(path: Path, draw: random.Random) -> None:
    os.truncate(path, 0)
