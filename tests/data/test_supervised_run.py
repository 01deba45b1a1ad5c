"""Supervised runs end to end: validation, the order of data after a resume, the 1-sqrt decay."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest

from tests.data import run_jobs as jobs
from tests.rank_report import RanksFailed
from tests.ranks import RankPool

pytestmark = pytest.mark.e2e
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2")
OVERLAP = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
NO_DROPOUT = ("--attention-dropout", "0", "--hidden-dropout", "0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Nine training chats and seven for validation: no batch divides them."""
    jobs.write_chats(tmp_path / "train.jsonl", number=9)
    jobs.write_chats(tmp_path / "valid.jsonl", number=7)
    return tmp_path


def run(ranks: RankPool, size: int, folder: Path, out: str, *flags: str) -> list[dict]:
    """The metrics of a job on `size` ranks."""
    return ranks(size).run(jobs.train, folder, out, *flags)[0]


@pytest.mark.parametrize(("size", "layout"), [(1, ()), (2, OVERLAP)], ids=["1", "overlap"])
def test_validation_changes_nothing(
    ranks: RankPool, folder: Path, size: int, layout: tuple[str, ...]
) -> None:
    plain = run(ranks, size, folder, "plain", *layout)
    valid = ("--valid-data", str(folder / "valid.jsonl"), "--eval-interval", "2")
    seen = run(ranks, size, folder, "seen", *valid, *layout)
    extra = {"valid_loss", "valid_tokens", "valid_perplexity"}
    assert [{k: v for k, v in line.items() if k not in extra} for line in seen] == plain
    assert [line["step"] for line in seen if "valid_loss" in line] == [2, 4]
    last = seen[-1]
    assert last["valid_perplexity"] == pytest.approx(math.exp(last["valid_loss"]))


def test_validation_drops_nothing_out(ranks: RankPool, folder: Path) -> None:
    flags = ("--valid-data", str(folder / "valid.jsonl"), "--lr", "0", "--train-iters", "1")
    [noisy] = run(ranks, 1, folder, "noisy", *flags)
    [quiet] = run(ranks, 1, folder, "quiet", *flags, *NO_DROPOUT)
    assert noisy["loss"] != quiet["loss"]
    assert noisy["valid_loss"] == quiet["valid_loss"]


def test_the_validation_loss_does_not_depend_on_the_layout(ranks: RankPool, folder: Path) -> None:
    saved = str(folder / "saved")
    flags = ("--valid-data", str(folder / "valid.jsonl"), "--lr", "0", "--lr-decay-iters", "2")
    run(ranks, 1, folder, "start", *flags, "--train-iters", "1", "--save", saved)
    layouts = {
        "global-token-mean": [("--packing",), TP2, PP2, (*PP2, "--packing")],
        "turn-mean": [(), (*TP2, "--packing")],
    }
    for mode, others in layouts.items():
        more = (*flags, "--train-iters", "2", "--load", saved, "--loss-normalization", mode)
        [alone] = run(ranks, 1, folder, f"{mode} alone", *more)
        assert ("valid_perplexity" in alone) == (mode == "global-token-mean")
        for layout in others:
            out = " ".join([mode, *layout])
            [line] = run(ranks, 2, folder, out, *more, *layout)
            assert line["valid_loss"] == pytest.approx(alone["valid_loss"], rel=1e-6), out
            assert line["valid_tokens"] == alone["valid_tokens"]


def warnings_of_a_run(folder: Path, *flags: str) -> list[str]:
    """What `pretrain_rl.py` warns of."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("pretrain_rl").addHandler(handler)
    jobs.train(folder, "cut", *flags)
    return [record.getMessage() for record in records]


def test_a_step_that_trains_nothing_says_so(ranks: RankPool, folder: Path) -> None:
    flags = ("--seq-length", "8", "--overlong", "truncate", "--train-iters", "1")
    [[warning]] = ranks(1).run(warnings_of_a_run, folder, *flags)
    assert warning.startswith("no token of this step is trained")
    assert "--overlong truncate at --seq-length 8" in warning


def test_a_resumed_run_sees_the_data_in_order(ranks: RankPool, folder: Path) -> None:
    whole = run(ranks, 1, folder, "whole")
    saved = ("--save", str(folder / "saved"), "--load", str(folder / "saved"))
    decay = ("--lr-decay-iters", "4")
    run(ranks, 1, folder, "halves", *saved, *decay, "--train-iters", "2")
    resumed = run(ranks, 1, folder, "halves", *saved, *decay)
    assert resumed == whole
    assert whole[-1]["epoch"] == pytest.approx(16 / 9)


def test_the_1_sqrt_decay(ranks: RankPool, folder: Path) -> None:
    """After t0 the rate is 1 - sqrt((t - t0) / (T - t0)) of its constant value."""
    warmup, start, end = 2, 4, 10
    flags = ("--lr-decay-style", "WSD", "--lr-wsd-decay-style", "minus_sqrt")
    steps = ("--train-iters", str(end), "--lr-wsd-decay-iters", str(end - start))
    lines = run(ranks, 1, folder, "out", *flags, *steps, "--lr-warmup-iters", str(warmup))
    for line in lines:
        done = line["step"] - 1  # updates before this one: the first is at rate 0 of the warm-up
        if done <= start:
            share = min(done / warmup, 1)
        else:
            share = 1 - math.sqrt((done - start) / (end - start))
        assert line["lr"] == pytest.approx(1e-2 * share, rel=1e-9, abs=1e-12)


def test_bad_lines_end_the_run_with_their_reasons(ranks: RankPool, folder: Path) -> None:
    with (folder / "train.jsonl").open("a", encoding="utf-8") as file:
        file.write('\n{"messages": []}\n')
    lines = run(ranks, 1, folder, "skip", "--bad-data", "skip")
    assert lines[0]["skipped_lines"] == 1
    with pytest.raises(RanksFailed, match=r"SystemExit: 2[^$]*line 10 messages is empty"):
        run(ranks, 1, folder, "stop")
