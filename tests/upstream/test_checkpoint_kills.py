"""Killed at any moment or out of room, a run goes on from the newest complete checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatron_ext.upstream import checkpoint_folder as folders
from megatron_ext.upstream.checkpoint_folder import TRACKER, folder_of
from tests.ranks import RankPool, RanksFailed
from tests.upstream import checkpoint_jobs as jobs
from tests.upstream.checkpoint_jobs import DROPOUT


def write(root: Path, step: int, *, keep: int = 0) -> None:
    """Save a checkpoint of three files as ``checkpoint.save`` does."""
    folders.clear_unfinished(root, "iter_*")
    partial = folders.begin(folder_of(root, step))
    for name in ("__0_0.distcp", ".metadata", "metadata.json"):
        (partial / name).write_text(json.dumps(step))
    folders.publish(partial, root=root, step=step, keep=keep)


def loaded(root: Path) -> int:
    """The step of the checkpoint to load, all of whose files must be of that step."""
    folder = folders.newest(root)
    assert folder is not None, "nothing loads"
    found = [json.loads(path.read_text()) for path in sorted(folder.iterdir())]
    step = int(folder.name.removeprefix("iter_"))
    assert found == [step] * 3
    return step


def is_killed_writing(root: Path, step: int, *, at: int) -> bool:
    """Save in a child process that is killed just before file operation ``at``."""
    child = os.fork()
    if child == 0:
        jobs.kill_at(lambda event, path: True, count=at)
        write(root, step, keep=1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.slow
def test_killed_at_every_file_operation_of_a_save(tmp_path: Path):
    """CASES G5: keep one checkpoint; killed while saving the next: the old one, or it, loads."""
    write(tmp_path, 1)
    number, outcomes = 0, []
    while is_killed_writing(tmp_path, loaded(tmp_path) + 1, at=number):
        before = outcomes[-1] if outcomes else 1
        outcomes.append(loaded(tmp_path))
        assert outcomes[-1] - before in (0, 1)
        number += 1
    assert number > 20, "the kills missed the save"
    assert len(set(outcomes)) > 1, "no kill came after the tracker"
    assert len(list(tmp_path.glob("iter_*"))) == 1


def test_the_tracker_decides_unless_it_is_damaged(tmp_path: Path, caplog):
    for step in (1, 2, 30):
        write(tmp_path, step)
    folder_of(tmp_path, 40).mkdir()  # a save of Megatron's that was killed
    (folder_of(tmp_path, 40) / "metadata.json").touch()
    (tmp_path / "iter_0000050.partial-1").mkdir()
    assert loaded(tmp_path) == 30
    (tmp_path / TRACKER).write_text("2")
    assert loaded(tmp_path) == 2
    assert not caplog.messages
    for text in (b"", b"\xff\x00", b"7", b"40", b"release", b"-1"):
        (tmp_path / TRACKER).write_bytes(text)
        assert loaded(tmp_path) == 30
        assert "the newest, of step 30, is taken" in caplog.messages[-1]
    (tmp_path / TRACKER).unlink()
    assert loaded(tmp_path) == 30


def test_keeping_n_never_deletes_the_newest(tmp_path: Path):
    for step in range(1, 6):
        write(tmp_path, step, keep=2)
        assert folders.complete_steps(tmp_path) == list(range(max(1, step - 1), step + 1))
    write(tmp_path, 4, keep=1)  # gone back: what was kept of the later steps does not count
    assert folders.complete_steps(tmp_path) == [4, 5]
    assert loaded(tmp_path) == 4


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_in_every_save_and_started_again(ranks: RankPool, tmp_path: Path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    ranks(1).run(jobs.train, jobs.flags_of(whole, *DROPOUT))
    flags = jobs.flags_of(killed, *DROPOUT, "--keep-checkpoints", "1")
    for moment, steps in {
        "writing": [],
        "in place": [1],
        "tracker": [1, 2],
        "replacing": [1, 2],
        "deleting": [4],
    }.items():
        with pytest.raises(RanksFailed, match="SIGKILL"):
            ranks(1).run(jobs.train_killed, flags, moment)
        assert folders.complete_steps(killed / "saved") == steps
    ranks(1).run(jobs.train, flags)
    assert_equal_ends(ranks, killed, whole)


@pytest.mark.slow
def test_a_full_disk_leaves_the_checkpoint_before(ranks: RankPool, tmp_path: Path):
    whole, short = tmp_path / "whole", tmp_path / "short"
    ranks(2).run(jobs.train, jobs.flags_of(whole, *DROPOUT))
    jobs.copy_run(whole, short, step=2)
    flags = jobs.flags_of(short, *DROPOUT)
    for text in ranks(2).run(jobs.train_without_room, flags):
        assert f"--save {short / 'saved'}: the checkpoint of step 3 could not be written" in text
        assert "GiB are free there). The one of step 2 is intact." in text
    assert [path.name for path in (short / "saved").glob("iter_*")] == ["iter_0000002"]
    ranks(2).run(jobs.train, flags)
    assert_equal_ends(ranks, short, whole)


def assert_equal_ends(ranks: RankPool, one: Path, other: Path) -> None:
    """Both runs logged the same and ended in the same checkpoint, bit for bit."""
    pair = [folder_of(run / "saved", 4) for run in (one, other)]
    assert ranks(1).run(jobs.differences, *pair) == [[]]
    assert jobs.metrics(one) == jobs.metrics(other)
