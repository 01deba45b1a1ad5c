"""A shortened `tools/benchmark.py episodes`: the memory of a rollout is flat, its time bounded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ENVIRONMENT, ROOT


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_episodes_leak_nothing_and_end_in_time(tmp_path: Path):
    """Time is the processor's, so that other load on the machine does not count."""
    output = tmp_path / "figures.json"
    subprocess.run(
        [
            sys.executable,
            "tools/benchmark.py",
            "episodes",
            "--episodes",
            "1200",
            "--output",
            output,
        ],
        cwd=ROOT,
        # freed caches go back to the system; by itself glibc keeps some of them, now and then
        env=os.environ | ENVIRONMENT | {"MALLOC_MMAP_THRESHOLD_": str(2**20)},
        check=True,
    )
    figures = json.loads(output.read_text())["figures"]
    assert figures["episodes"] == 1200 and figures["sequences_left"] == 0
    assert figures["cpu_seconds"] < 60
    resident, blocks = figures["resident_mib"], figures["python_blocks"]
    assert resident["end"] - resident["warm"] < 8  # a hundredth of the process
    assert blocks["end"] - blocks["warm"] < 2000  # an episode that stayed would hold ten or more
