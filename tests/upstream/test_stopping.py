"""R3, R6, R8 on whole runs: whatever ends one, it goes on bit for bit, and says what happened."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from megatron_ext.files.lock import LOCK_NAME, hold
from megatron_ext.upstream.checkpoint_folder import complete_steps, folder_of
from tests.ranks import RankPool
from tests.upstream import checkpoint_jobs, stop_jobs
from tests.upstream.rl_jobs import metrics_of
from tests.upstream.stop_jobs import flags_of

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def whole(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps on two ranks that was left alone."""
    folder = tmp_path_factory.mktemp("whole")
    assert ranks(2).run(stop_jobs.run, flags_of(folder)) == [0, 0]
    return folder


def assert_equal_ends(ranks: RankPool, one: Path, other: Path) -> None:
    """Both runs left the same record and the same last checkpoint, bit for bit."""
    pair = [folder_of(folder / "saved", 4) for folder in (one, other)]
    assert ranks(1).run(checkpoint_jobs.differences, *pair) == [[]]
    assert metrics_of(one) == metrics_of(other)
    for name in ("rollouts.jsonl", "evaluations.jsonl"):
        assert (one / name).read_bytes() == (other / name).read_bytes()


@pytest.mark.parametrize(
    ("place", "count", "number", "saved"),
    [
        ("step", 70, signal.SIGTERM, 2),  # in the rollout of step 3
        ("learn", 3, signal.SIGINT, 2),  # with the episodes of step 3 there
        ("_remember_random", 3, signal.SIGHUP, 2),  # step 2 is finished, its evaluation begins
        ("step", 5, signal.SIGTERM, 0),  # in the evaluation before the first step
    ],
)
@pytest.mark.slow
def test_r8_a_signal_saves_and_the_run_goes_on_as_one_left_alone(
    ranks: RankPool, whole: Path, tmp_path: Path, place: str, count: int, number: int, saved: int
) -> None:
    codes = ranks(2).run(
        stop_jobs.signalled, flags_of(tmp_path), rank=1, number=number, place=place, count=count
    )
    assert codes == [128 + number] * 2
    assert complete_steps(tmp_path / "saved") == ([saved] if saved else [])
    record = json.loads((tmp_path / "config.json").read_text())
    assert record["status"] == "stopped"
    name = signal.Signals(number).name
    assert record["reason"].startswith(f"{name} came; step {saved} was the last")
    assert ranks(2).run(stop_jobs.run, flags_of(tmp_path)) == [0, 0]
    assert json.loads((tmp_path / "config.json").read_text())["status"] == "finished"
    assert_equal_ends(ranks, tmp_path, whole)


@pytest.mark.slow
def test_r8_a_rollout_that_takes_minutes_is_left_within_seconds(
    ranks: RankPool, tmp_path: Path
) -> None:
    """On the replica that got no signal, too."""
    flags = flags_of(tmp_path, "--eval-every", "0", "--rollout-max-new-tokens", "140")
    took = ranks(2).run(
        stop_jobs.with_slow_sampling, flags, seconds=0.5, rank=1, number=signal.SIGTERM
    )
    assert max(took) < 6  # 140 tokens would take 70 seconds
    assert json.loads((tmp_path / "config.json").read_text())["reason"].endswith(
        "step 0 was the last; nothing was saved"
    )


def test_r8_the_flags_of_megatron_end_a_run(ranks: RankPool, whole: Path, tmp_path: Path) -> None:
    """--exit-interval, and a run that was to save every 0 minutes: each step, two are kept."""
    by_time = ["--save-interval-minutes", "1e-9"]
    assert (
        ranks(2).run(stop_jobs.run, flags_of(tmp_path, "--exit-interval", "3", *by_time)) == [0] * 2
    )
    assert complete_steps(tmp_path / "saved") == [2, 3]
    record = json.loads((tmp_path / "config.json").read_text())
    assert record["reason"].startswith("step 3 is one of --exit-interval; the checkpoint of step 3")
    assert ranks(2).run(stop_jobs.run, flags_of(tmp_path)) == [0, 0]
    assert_equal_ends(ranks, tmp_path, whole)


def test_r3_a_run_whose_folder_is_in_use_is_refused_on_all_ranks(
    ranks: RankPool, tmp_path: Path
) -> None:
    (tmp_path / "saved").mkdir()
    with hold(tmp_path / "saved" / LOCK_NAME, what="--save"):
        said = ranks(2).run(stop_jobs.impatient_refusal, flags_of(tmp_path))
    assert f"--save {tmp_path / 'saved'} is in use by process" in said[0]
    assert not (tmp_path / "metrics.jsonl").exists()


def test_r6_no_room_for_the_reference_policy_is_one_message(
    ranks: RankPool, tmp_path: Path
) -> None:
    flags = flags_of(tmp_path, "--kl-coefficient", "0.1")
    [said] = ranks(1).run(stop_jobs.full_reference, flags)
    assert "the weights of the reference policy could not be written to reference" in said
    assert not list((tmp_path / "saved").glob("reference*"))
