"""What must hold when a run that was harmed has gone on to its end."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.upstream.checkpoint_jobs import differences as checkpoint_differences
from tools.soaking.jobs import LAST_STEP, forked

_CLOCKED = ("seconds", "_per_second", "memory_bytes")
"""Endings of metrics that a clock or the machine decides."""
_LEFTOVERS = ("*.partial*", "*.deleted-*", "*.tmp", ".*.lock")


def differences(harmed: Path, whole: Path, *, may_lack_record: bool) -> list[str]:
    """How a finished run differs from the one that was left alone.

    may_lack_record: a disk was full, so lines may be missing, and what is there must be right.
    """
    return [
        *_shard_differences(harmed, whole),
        *_metric_differences(harmed, whole, may_lack=may_lack_record),
        *_broken_lines(harmed),
        *[
            f"{path.relative_to(harmed)} is left over"
            for pattern in _LEFTOVERS
            for path in harmed.rglob(pattern)
        ],
    ]


def _shard_differences(harmed: Path, whole: Path) -> list[str]:
    folders = [run / "saved" / f"iter_{LAST_STEP:07d}" for run in (harmed, whole)]
    out = harmed / "differences"

    def compare() -> int:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch explains itself at length
        store = dist.FileStore(str(harmed / ".store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        out.write_text(json.dumps(checkpoint_differences(*folders)))
        return 0

    _, status = os.waitpid(forked(compare), 0)
    if status:
        return ["the last checkpoints cannot be compared"]
    return [f"{name} of the last checkpoint differs" for name in json.loads(out.read_text())]


def metrics_of(run: Path) -> dict[int, dict[str, Any]]:
    """What was recorded of each step, but for what a clock decides."""
    path = run / "out" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {
        line["step"]: {k: v for k, v in line.items() if not k.endswith(_CLOCKED)} for line in lines
    }


def _metric_differences(harmed: Path, whole: Path, *, may_lack: bool) -> list[str]:
    mine, theirs = metrics_of(harmed), metrics_of(whole)
    if may_lack:
        theirs = {step: theirs[step] for step in theirs if step in mine}
    if mine.keys() != theirs.keys():
        return [f"metrics of the steps {sorted(mine)}, not {sorted(theirs)}"]
    return [f"metrics of step {step} differ" for step in theirs if mine[step] != theirs[step]]


def _broken_lines(harmed: Path) -> list[str]:
    found = []
    for path in sorted((harmed / "out").glob("*.jsonl")):
        text = path.read_text()
        if text and not text.endswith("\n"):
            found.append(f"{path.name} ends in half a line")
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                json.loads(line)
            except ValueError:
                found.append(f"{path.name}, line {number} is no JSON")
    return found
