"""The folder a run writes to: created, cleared of an earlier run, its files replaced whole.

Invariant: whoever opens a replaced file reads the old content or the new, never a part of either,
also when the writer is killed in between.
Two runs at the same time are kept apart by a lock (files/lock.py), which the caller holds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO
from uuid import uuid4

METRICS_NAME = "metrics.jsonl"
CONFIG_NAME = "config.json"
REPORT_NAME = "report.html"
ROLLOUTS_NAME = "rollouts.jsonl"
EVALUATIONS_NAME = "evaluations.jsonl"
TENSORBOARD_NAME = "tensorboard"
WANDB_NAMES = ("wandb", "wandb_run_id")


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A text file beside `path` that takes its place when the block ends without an error."""
    beside = path.with_name(f".{path.name}.{os.getpid()}-{uuid4().hex[:8]}.tmp")
    try:
        with beside.open("x", encoding="utf-8", newline="") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def usable(output_dir: str) -> Iterator[None]:
    """Let errors of files that are opened in a block name --output-dir and the remedy."""
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno,
            f"--output-dir {output_dir} cannot be used as the folder of this run "
            f"({error.strerror}). Choose a folder that this user may create and write to, with "
            "room on its disk.",
        ) from error


def open_output_folder(output_dir: str, *, is_new_run: bool) -> Path:
    """Create the folder; for a new run, move what an earlier run left into `previous-N/` in it.

    Raises OSError naming --output-dir when the folder cannot be created or is not a folder.
    """
    folder = Path(output_dir)
    with usable(output_dir):
        folder.mkdir(parents=True, exist_ok=True)
        for name in (METRICS_NAME, CONFIG_NAME, REPORT_NAME, WANDB_NAMES[1]):
            for leftover in folder.glob(f".{name}.*.tmp"):  # of a process that was killed
                leftover.unlink()
        if is_new_run:
            _move_earlier_run(folder)
    return folder


def _move_earlier_run(folder: Path) -> None:
    records = [folder / name for name in (METRICS_NAME, ROLLOUTS_NAME, EVALUATIONS_NAME)]
    if not any(path.exists() and path.stat().st_size > 0 for path in records):
        return
    number = 1
    while (folder / f"previous-{number}").exists():
        number += 1
    previous = folder / f"previous-{number}"
    previous.mkdir()
    names = (METRICS_NAME, CONFIG_NAME, REPORT_NAME, ROLLOUTS_NAME, EVALUATIONS_NAME)
    for name in (*names, TENSORBOARD_NAME, *WANDB_NAMES):
        if (folder / name).exists():
            (folder / name).rename(previous / name)
