"""What is wrong at first sight is told before torch and Megatron are imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.options.first_look import AFTER, first_problems, given_values, look_first

ROOT = Path(__file__).resolve().parents[2]


def test_r9_the_message_comes_before_anything_heavy_is_imported(tmp_path: Path):
    words = ["--lr", "nan", "--seed=-1", "--save", "/proc/x", "--seq-length", "three"]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "pretrain_rl.py", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = [line for line in ran.stderr.splitlines() if not line.startswith("import time:")]
    assert ran.returncode == 2
    assert said[:2] == [
        "usage: torchrun --nproc-per-node RANKS pretrain_rl.py [options]",
        "pretrain_rl.py: error: ",
    ]
    flags = [line.split()[0] for line in said[2:]]
    assert flags == ["--seq-length", "--seed", "--lr", "--save", AFTER.split()[0]]
    assert "Traceback" not in ran.stderr
    modules = [line.rpartition("|")[2].strip() for line in ran.stderr.splitlines()]
    assert not [name for name in modules if name.split(".")[0] in ("torch", "megatron", "numpy")]


def test_values_are_those_that_argparse_takes():
    words = ["--a", "1", "--a=2", "--b", "-1e-3", "--c", "--d", "-inf", "--e=x=y", "stray", "--f"]
    words += ["-g", "--h"]
    assert given_values(words) == {"--a": "2", "--b": "-1e-3", "--d": "-inf", "--e": "x=y"}


def test_the_last_value_counts_and_help_is_given():
    assert first_problems(["--lr", "nan", "--lr", "1e-3", "--seed", "1"]) == []
    look_first(["--help", "--lr", "nan"])
    with pytest.raises(SystemExit) as raised:
        look_first(["--lr", "1e-3", "--lr", "nan"])
    assert raised.value.code == 2
