"""Whole runs: the same on every layout, and after an interruption."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron_ext.upstream.checkpoint_folder import TRACKER, folder_of
from tests.marks import slow_except
from tests.ranks import RankPool
from tests.upstream import checkpoint_jobs
from tests.upstream.rl_jobs import (
    REINFORCE,
    SMALL,
    flags_of,
    metrics_of,
    refusal,
    run,
    warm_start,
)

pytestmark = pytest.mark.e2e
LAYOUTS = {
    "dp2": (2, ""),
    "tp2 sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2 vpp2": (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
}
LAYOUT_DEPENDENT = {"padding_share"}
"""Rows are padded to a multiple of the tensor-parallel ranks, and pipelines get fillers."""


@pytest.fixture(scope="module")
def warm(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose policy earns rewards now and then."""
    folder = tmp_path_factory.mktemp("warm")
    ranks(1).run(warm_start, folder, timeout=120)
    return folder


@pytest.fixture(scope="module")
def single(ranks: RankPool, warm: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Metrics of three steps of one process."""
    folder = tmp_path_factory.mktemp("single")
    ranks(1).run(run, flags_of(folder, warm), timeout=120)
    return metrics_of(folder)


def test_a_run_leaves_what_was_promised(single: list[dict]) -> None:
    assert [line["step"] for line in single] == [0, 1, 2, 3]
    assert ["eval_pass_rate" in line for line in single] == [True, False, True, True]
    first = single[0]
    assert first["eval_pass_rate_low"] <= first["eval_pass_rate"] <= first["eval_pass_rate_high"]
    assert first["eval_pass_at_2_sampled"] >= first["eval_pass_rate_sampled"]
    assert sum(line["trained_episodes"] for line in single[1:]) > 0
    for line in single[1:]:
        assert line["episodes"] == 16
        assert 0 <= line["pass_rate"] <= 1
        assert line["response_tokens_min"] <= line["response_tokens_median"] <= 40
        for name in ("zero_advantage_share", "truncated_share", "turns_mean"):
            assert line[name] >= 0
    learned = [line for line in single[1:] if "ratio_deviation" in line]
    assert learned and all(line["zero_advantage_share"] < 1 for line in learned)
    for line in learned:  # not the steps whose groups all had equal rewards
        assert line["ratio_deviation"] == 0
        assert line["sampler_gap"] < 1e-5
        assert line["padding_share"] >= 0
        assert line["clip_fraction_low"] == line["clip_fraction_high"] == 0


@pytest.mark.parametrize("name", slow_except({"dp2"}, LAYOUTS))
def test_three_steps_are_the_same_on_every_layout(
    ranks: RankPool, warm: Path, single: list[dict], tmp_path: Path, name: str
) -> None:
    size, flags = LAYOUTS[name]
    ranks(size).run(run, flags_of(tmp_path, warm, *flags.split()), timeout=120)
    found = metrics_of(tmp_path)
    assert len(found) == len(single)
    for mine, theirs in zip(found, single, strict=True):
        kept = [k for k in theirs if k not in LAYOUT_DEPENDENT]
        assert {k: mine[k] for k in kept} == pytest.approx(
            {k: theirs[k] for k in kept}, rel=1e-4, abs=1e-5
        )


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("--algorithm grpo --minibatches 2", id="reference"),
        pytest.param("--algorithm dapo --batch-epochs 2", id="epochs", marks=pytest.mark.slow),
        pytest.param(
            "--algorithm dapo --group-size 2 --global-batch-size 2 --use-distributed-optimizer",
            id="hardly an update",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_resumed_run_is_an_uninterrupted_one(
    ranks: RankPool, warm: Path, tmp_path: Path, flags: str
) -> None:
    """Bit for bit: weights, optimizer, metrics and transcripts."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    more = [*flags.split(), "--train-iters", "4", "--save-interval", "2"]
    ranks(2).run(run, flags_of(whole, warm, *more), timeout=120)
    ranks(2).run(run, flags_of(parts, warm, *more), timeout=120)
    shutil.rmtree(folder_of(parts / "saved", 4))
    (parts / "saved" / TRACKER).write_text("2")
    ranks(2).run(run, flags_of(parts, warm, *more), timeout=120)
    pair = [folder_of(folder / "saved", 4) for folder in (whole, parts)]
    assert ranks(1).run(checkpoint_jobs.differences, *pair) == [[]]
    assert metrics_of(parts) == metrics_of(whole)
    for name in ("rollouts.jsonl", "evaluations.jsonl"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize(
    ("tasks", "named"),
    [
        ("", "holds no task"),
        ('{"prompt": "1 + 1 = ", "answer": "2", "verifier": "no such"}', "line 1: `verifier`"),
        (None, "is no file"),
    ],
    ids=["empty", "malformed", "missing"],
)
def test_bad_tasks_are_refused_before_anything_is_rolled_out(
    ranks: RankPool, tmp_path: Path, tasks: str | None, named: str
) -> None:
    file = tmp_path / "tasks.jsonl"
    if tasks is not None:
        file.write_text(tasks)
    words = [*SMALL, *REINFORCE, "--eval-every", "0", "--tasks", str(file)]
    [said] = ranks(1).run(refusal, words)
    assert named in said


def test_tasks_of_a_file_run_with_bytes_as_tokens(ranks: RankPool, tmp_path: Path) -> None:
    """Prompts beyond the context fail by themselves; the others are trained."""
    tasks = tmp_path / "tasks.jsonl"
    asked = [{"prompt": f"{i} + 1 = ", "answer": i + 1, "verifier": "numeric"} for i in range(3)]
    asked.append({"prompt": "9" * 200, "answer": 1, "verifier": "numeric"})
    tasks.write_text("\n".join(map(json.dumps, asked)))
    folder = tmp_path / "run"
    words = [
        *(*SMALL, *REINFORCE, "--tasks", str(tasks), "--eval-tasks", str(tasks)),
        *("--eval-count", "4", "--train-iters", "1", "--output-dir", str(folder)),
        *("--algorithm", "grpo", "--kl-coefficient", "0.1", "--rollout-max-new-tokens", "8"),
    ]
    ranks(1).run(run, words)
    first, last = metrics_of(folder)
    assert first["eval_failed_episodes"] == 1
    assert last["invalid_share"] == 0.25
    assert last["updates"] == 1
