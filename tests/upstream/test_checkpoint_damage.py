"""A damaged checkpoint is named with its file, and the newest intact one before it is taken."""

from __future__ import annotations

import json
import logging
import os
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.upstream import checkpoint
from megatron_ext.upstream.checkpoint_files import (
    CHECKSUMS,
    FileRecord,
    read_checksums,
    record_of,
)
from megatron_ext.upstream.checkpoint_folder import TRACKER, complete_steps, folder_of
from megatron_ext.upstream.checkpoint_shared import check_one_folder, shares
from megatron_ext.upstream.cpu import device_mode
from tests.ranks import RankPool
from tests.upstream import checkpoint_jobs as jobs
from tests.upstream.checkpoint_jobs import EXACT

TWO_STEPS = [*EXACT, "--train-iters", "2"]
DATA = "__0_0.distcp"


def flip(path: Path) -> None:
    """Change one bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def cut(path: Path) -> None:
    """Lose the second half."""
    os.truncate(path, path.stat().st_size // 2)


DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "truncated shard": (DATA, cut, f"{DATA} has "),
    "empty shard": (DATA, lambda path: os.truncate(path, 0), f"{DATA} has 0 bytes"),
    "missing shard": (DATA, Path.unlink, f"{DATA} is missing"),
    "one flipped bit": (DATA, flip, f"{DATA} is damaged (another checksum"),
    "truncated .metadata": (".metadata", cut, ".metadata cannot be read"),
    "empty .metadata": (".metadata", lambda path: os.truncate(path, 0), ".metadata cannot be read"),
    "missing .metadata": (".metadata", Path.unlink, ".metadata is missing"),
    "empty metadata.json": (
        "metadata.json",
        lambda p: os.truncate(p, 0),
        "metadata.json is missing",
    ),
    "another json": ("metadata.json", lambda p: p.write_text("[]"), "metadata.json cannot be read"),
    "damaged checksums": (CHECKSUMS, cut, f"{CHECKSUMS} cannot be read"),
}
"""What -> (file, how, what the message says of it)."""
FOUND_WITHOUT_CHECKSUMS = set(DAMAGE) - {"one flipped bit", "damaged checksums"}


@pytest.fixture(scope="module")
def plain(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps on one process, both of them saved."""
    run = tmp_path_factory.mktemp("plain") / "run"
    ranks(1).run(jobs.train, jobs.flags_of(run, *TWO_STEPS))
    return run


class Kept(logging.Handler):
    """Keeps the messages of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self.texts.append(record.getMessage())


def resumed(flags: list[str], runs: dict[str, Path], change: dict) -> dict[str, tuple[int, str]]:
    """Case -> (step that is taken, warnings), or (-1, the error); one model tries them all."""
    found, kept = {}, Kept()
    logging.getLogger("megatron_ext").addHandler(kept)
    with device_mode():
        args, model, layout = jobs.build(flags)
        for case, root in runs.items():
            kept.texts.clear()
            own = Namespace(**vars(args) | {"load": str(root), "save": None} | change)
            try:
                step = checkpoint.resume(own, model, layout).step
                found[case] = (step, "; ".join(kept.texts))
            except ValueError as error:
                found[case] = (-1, str(error))
    return found


def damaged_runs(plain: Path, root: Path, steps: list[int], *, checksums: bool) -> dict[str, Path]:
    """A run for each kind of damage to these steps."""
    runs = {}
    for case, (file, damage, _) in DAMAGE.items():
        runs[case] = root / case
        shutil.copytree(plain / "saved", runs[case])
        for step in (1, 2):
            if not checksums:
                (folder_of(runs[case], step) / CHECKSUMS).unlink()
            elif step in steps:
                damage(folder_of(runs[case], step) / file)
            if not checksums and step in steps and file != CHECKSUMS:
                damage(folder_of(runs[case], step) / file)
    return runs


@pytest.mark.slow
def test_R5_the_newest_intact_step_is_taken(ranks: RankPool, plain: Path, tmp_path: Path):
    runs = damaged_runs(plain, tmp_path, [2], checksums=True)
    [found] = ranks(1).run(resumed, jobs.flags_of(plain, *TWO_STEPS), runs, {})
    for case, (step, text) in found.items():
        assert step == 1, (case, text)
        assert DAMAGE[case][2] in text
        assert "iter_0000002" in text
        assert "iter_0000001 is taken" in text or "the newest, of step 1, is taken" in text


@pytest.mark.slow
def test_R5_a_named_step_or_nothing_intact_is_one_message(
    ranks: RankPool, plain: Path, tmp_path: Path
):
    flags = jobs.flags_of(plain, *TWO_STEPS)
    named = damaged_runs(plain, tmp_path / "named", [2], checksums=True)
    [found] = ranks(1).run(resumed, flags, named, {"ckpt_step": 2})
    both = damaged_runs(plain, tmp_path / "both", [1, 2], checksums=True)
    [nothing] = ranks(1).run(resumed, flags, both, {})
    for case in DAMAGE:
        for step, text in (found[case], nothing[case]):
            assert step == -1
            assert DAMAGE[case][2] in text
            assert "iter_0000002" in text
            assert "Copy" in text or "It holds 1." in text
        assert "iter_0000001" in nothing[case][1]


@pytest.mark.slow
def test_R5_what_megatron_saved_is_looked_at_without_checksums(
    ranks: RankPool, plain: Path, tmp_path: Path
):
    runs = damaged_runs(plain, tmp_path, [2], checksums=False)
    [found] = ranks(1).run(resumed, jobs.flags_of(plain, *TWO_STEPS), runs, {})
    for case, (step, text) in found.items():
        assert step == (1 if case in FOUND_WITHOUT_CHECKSUMS else 2), (case, text)
    unchecked = damaged_runs(plain, tmp_path / "unchecked", [2], checksums=True)
    some = {case: unchecked[case] for case in ("one flipped bit", "missing shard")}
    flags = jobs.flags_of(plain, *TWO_STEPS)
    [found] = ranks(1).run(resumed, flags, some, {"verify_checksums": False})
    assert [found[case][0] for case in some] == [2, 1]


@pytest.mark.slow
def test_checksums_name_every_file(plain: Path):
    folder = folder_of(plain / "saved", 2)
    records = read_checksums(folder)
    assert records is not None
    assert set(records) == {p.name for p in folder.iterdir()} - {CHECKSUMS}
    assert records == {name: record_of(folder / name) for name in records}
    (folder.parent / "text").write_bytes(b"123456789")
    assert record_of(folder.parent / "text") == FileRecord(num_bytes=9, crc32=0xCBF43926)


def test_every_file_is_read_by_one_rank():
    records = {str(i): FileRecord(num_bytes=n, crc32=0) for i, n in enumerate([9, 1, 5, 4, 8, 0])}
    parts = shares(records, 2)
    assert sorted(name for part in parts for name in part) == sorted(records)
    assert [sum(records[name].num_bytes for name in part) for part in parts] == [14, 13]
    assert shares({}, 3) == [[], [], []]


def save_apart(flags: list[str], roots: list[Path]) -> tuple[str, str]:
    """Why ranks that see different folders under one name cannot save, and cannot begin."""
    with device_mode():
        args, model, layout = jobs.build(flags)
        root = roots[int(os.environ["RANK"])]
        root.mkdir(exist_ok=True)
        own = Namespace(**vars(args) | {"save": str(root)})
        texts = []
        for attempt in (
            lambda: checkpoint.save(own, model, layout, progress=checkpoint.Progress(step=3)),
            lambda: check_one_folder(root, layout),
        ):
            with pytest.raises(OSError, match="is not one folder") as raised:
                attempt()
            texts.append(str(raised.value))
        return texts[0], texts[1]


@pytest.mark.slow
def test_R1_two_hosts_with_different_disks(ranks: RankPool, tmp_path: Path):
    """Nothing is published, and the message says which rank wrote what where."""
    roots = [tmp_path / "here", tmp_path / "there"]
    flags = jobs.flags_of(tmp_path / "run", *TWO_STEPS)
    here, there = ranks(2).run(save_apart, flags, roots)
    assert here[0] == there[0]
    for part in ("__1_0.distcp is missing", "rank 1 on ", f"wrote it to {roots[1]}", "rank 0 on "):
        assert part in here[0]
    assert f"--save {roots[0]}" in here[0]
    assert "is not seen by rank 1 on " in here[1]
    for root in roots:
        assert not complete_steps(root)
        assert not (root / TRACKER).exists()
        assert not list(root.iterdir())


def test_no_json_of_another_shape_is_checksums(plain: Path, tmp_path: Path):
    for text in ("[]", "{}", '{"files": []}', '{"files": {"a": 1}}', json.dumps({"files": None})):
        (tmp_path / CHECKSUMS).write_text(text)
        with pytest.raises(ValueError, match=r"checksums\.json cannot be read"):
            read_checksums(tmp_path)
