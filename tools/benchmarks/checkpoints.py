"""`checkpoints`: what the checksums of a checkpoint's files cost, beside writing and reading them.

One file is written as a rank writes it (``torch.save``, then fsync) and read again from the page
cache, by one process: the cost is a rank's, and ranks work at the same time.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_ext.upstream.checkpoint_files import record_of


def add_arguments(parser: ArgumentParser) -> None:
    """Options of the subcommand."""
    parser.add_argument("--megabytes", type=int, default=1024, help="size of the file")
    parser.add_argument("--folder", type=Path, help="disk to write to; unset = the temporary one")


def run(options: Namespace) -> dict[str, object]:
    """Seconds and CPU seconds per GB: writing, loading, checksums, --verify-integrity's hashes."""
    values = torch.rand(options.megabytes * 250_000)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "shard"

        def write() -> None:
            with path.open("wb") as file:
                torch.save(values, file)
                file.flush()
                os.fsync(file.fileno())

        ways: dict[str, Callable[[], object]] = {
            "written": write,
            "loaded": lambda: torch.load(path, weights_only=True),
            "CRC-32": lambda: record_of(path),
            "SHA-256": lambda: sha256(path),
        }
        found = {name: fastest(way) for name, way in ways.items()}
    gigabytes = options.megabytes / 1000
    return {
        "seconds_per_gigabyte": {name: wall / gigabytes for name, (wall, _) in found.items()},
        "cpu_seconds_per_gigabyte": {name: cpu / gigabytes for name, (_, cpu) in found.items()},
    }


def sha256(path: Path) -> str:
    """A file's hash, as Megatron's --verify-integrity reads it (on one rank for all files)."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def fastest(action: Callable[[], object]) -> tuple[float, float]:
    """Seconds and CPU seconds, the least of five times each."""
    walls, cpus = [], []
    for _ in range(5):
        wall, cpu = time.perf_counter(), time.process_time()
        action()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return min(walls), min(cpus)
