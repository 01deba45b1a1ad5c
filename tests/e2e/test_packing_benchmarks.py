"""The benchmarks of packing run, small: their deterministic figures are right.

Speed and memory at full size are for `python tools/benchmark.py`; docs/numerics.md has the figures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import ENVIRONMENT, ROOT, RankPool
from tools import benchmark

TINY = ["--num-layers", "1", "--hidden-size", "32", "--vocab-size", "32"]


def figures(ranks: RankPool, folder: Path, *words: str) -> dict[str, Any]:
    """What one run of the benchmark found, in a rank of the pool, whose imports cost nothing."""
    file = folder / "figures.json"
    ranks(1).run(benchmark.main, [*words, "--output", str(file)], timeout=100)
    return json.loads(file.read_text())["figures"]


def figures_of_a_process(folder: Path, *words: str) -> dict[str, Any]:
    """The same in a process of its own, whose peak of memory is the benchmark's."""
    file = folder / "figures.json"
    done = subprocess.run(
        [sys.executable, "tools/benchmark.py", *words, "--output", str(file)],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(file.read_text())["figures"]


@pytest.mark.e2e
def test_packing(ranks: RankPool, tmp_path: Path) -> None:
    found = figures(ranks, tmp_path, "packing", *TINY, "--rounds", "1")
    assert found["padding_share"]["padded"] == pytest.approx(0.742, abs=5e-4)
    assert found["padding_share"]["packed"] == 0
    assert found["ratio"] > 1


@pytest.mark.e2e
def test_microbatches(ranks: RankPool, tmp_path: Path) -> None:
    found = figures(ranks, tmp_path, "microbatches", *TINY, "--scale", "512")
    assert list(found["padding_share"].values()) == pytest.approx([0.59, 0.31, 0], abs=0.01)
    assert found["padding_by_update"]["512"] == pytest.approx(0.029, abs=1e-3)
    assert found["updates"] == 32


@pytest.mark.e2e
def test_logprobs(tmp_path: Path) -> None:
    sizes = ["--tokens", "2048", "--vocab-size", "16384", "--hidden-size", "16"]
    found = figures_of_a_process(tmp_path, "logprobs", *sizes, "--logprob-chunk-size", "64")
    assert found["peak_ratio"] < 0.1
    assert found["value_difference"] < 1e-5
    assert found["gradient_difference"] < 1e-5
