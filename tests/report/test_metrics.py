"""metrics.jsonl: read back as written, strict JSON, and the same after a resume."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.report.metrics import (
    MetricsFile,
    decode_record,
    encode_record,
    plain_metrics,
    read_metrics,
)
from megatron_ext.report.sink import Outcome

NAMES = st.text(alphabet='ab_/ $"é', min_size=1, max_size=4)


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def losses(steps: range) -> dict[int, dict[str, float]]:
    return {step: {"loss": 1.0 - 0.3 * step, "tokens": 10 * step} for step in steps}


def write_steps(path: Path, steps: range, *, resume_step: int | None = None) -> None:
    file = MetricsFile(path, resume_step=resume_step)
    for step, metrics in losses(steps).items():
        file.write(step, metrics)


@settings(max_examples=60, deadline=None)
@given(
    step=st.integers(0, 2**40),
    metrics=st.dictionaries(NAMES, st.integers(-(2**60), 2**60) | st.floats(), max_size=6),
)
def test_a_record_survives_strict_json(step, metrics):
    line = json.dumps(encode_record(step, metrics), allow_nan=False)

    got_step, got = decode_record(json.loads(line, parse_constant=refuse_constant))

    assert got_step == step
    assert list(got) == list(metrics)
    # repr tells -0.0 from 0.0, 1 from 1.0, and takes nan for nan
    assert [repr(value) for value in got.values()] == [repr(value) for value in metrics.values()]


def test_a_value_that_is_not_finite_is_null_and_named():
    record = encode_record(3, {"loss": math.nan, "reward": -math.inf, "lr": -0.5})
    assert record == {
        "step": 3,
        "loss": None,
        "loss_nonfinite": "nan",
        "reward": None,
        "reward_nonfinite": "-inf",
        "lr": -0.5,
    }


@pytest.mark.parametrize("resume_step", [0, 1, 3, 6])
@pytest.mark.parametrize("torn", ["", '{"step": 7, "lo', '{"step": 7', "\0\0\0"])
def test_a_resumed_file_equals_an_uninterrupted_one(tmp_path, resume_step, torn):
    uninterrupted, resumed = tmp_path / "uninterrupted.jsonl", tmp_path / "resumed.jsonl"
    write_steps(uninterrupted, range(1, 11))
    write_steps(resumed, range(1, 7))
    with resumed.open("a") as file:
        file.write(torn)

    write_steps(resumed, range(resume_step + 1, 11), resume_step=resume_step)

    assert resumed.read_bytes() == uninterrupted.read_bytes()
    assert sorted(tmp_path.iterdir()) == [resumed, uninterrupted]  # nothing is left beside them


def test_a_line_that_lacks_only_its_end_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 4))
    path.write_bytes(path.read_bytes().rstrip(b"\n"))

    write_steps(path, range(4, 6), resume_step=3)

    assert dict(read_metrics(path)) == losses(range(1, 6))


def test_a_broken_line_before_whole_ones_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2, .*Remove that line"):
        MetricsFile(path, resume_step=3)
    assert path.read_text().startswith('{"step": 1}\n{"step": 2')  # untouched


def test_a_killed_process_leaves_every_line_it_wrote(tmp_path):
    path = tmp_path / "metrics.jsonl"
    program = (
        "import os, pathlib, signal, sys\n"
        "from megatron_ext.report.metrics import MetricsFile\n"
        "file = MetricsFile(pathlib.Path(sys.argv[1]), resume_step=None)\n"
        "for step in (1, 2, 3): file.write(step, {'loss': -step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], timeout=60)
    assert done.returncode == -9
    assert dict(read_metrics(path)) == {step: {"loss": -step} for step in (1, 2, 3)}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full to stand for a full disk")
def test_r6_a_full_disk_is_an_error_that_names_the_file_and_steps_wait(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    file = MetricsFile(path, resume_step=None)
    with pytest.raises(OSError, match=r"step 1 .* to .*metrics\.jsonl .*No space"):
        file.write(1, {"loss": 0.5})
    with pytest.raises(OSError):
        file.write(2, {"loss": 0.25})
    assert file.waiting_steps == [1, 2]
    path.unlink()  # room again
    file.close(Outcome(status="finished"))
    assert dict(read_metrics(path)) == {1: {"loss": 0.5}, 2: {"loss": 0.25}}


def test_every_value_that_is_no_number_is_named_at_once():
    with pytest.raises(ValueError, match=r"'loss' is a Tensor, .*'step' is reserved.*item\(\)"):
        plain_metrics({"loss": torch.tensor(1.0), "step": 3, "lr": 0.1})


def test_metrics_become_plain_numbers_and_none_is_left_out():
    plain = plain_metrics({"a": True, "b": None, "c": torch.ones(1).numpy()[0], "d": 3})
    assert plain == {"a": 1, "c": 1.0, "d": 3}
    assert [type(value) for value in plain.values()] == [int, float, int]
