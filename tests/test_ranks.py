"""The pool of ranks: results come back, and every kind of failure is told within the time limit."""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.rank_report import RanksFailed
from tests.ranks import QUIET_OUTPUT, RankPool


def summed(value: float, *, scale: float = 1.0) -> tuple[int, torch.Tensor]:
    x = torch.tensor([value * scale * (dist.get_rank() + 1)])
    dist.all_reduce(x)
    return dist.get_rank(), x


def surroundings() -> tuple:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    environment = tuple(os.environ[name] for name in names)
    return environment, torch.get_num_threads(), torch.rand(1).item(), torch.cuda.is_available()


def fail_on_rank_1(how: str, *, others: str) -> None:
    print("about to", how)
    dist.barrier()  # a rank that is still joining would lose its peer instead
    how = how if dist.get_rank() == 1 else others
    if how == "raise":
        raise ValueError("--seq-length 7 is odd")
    if how == "exit":
        os._exit(3)
    if how == "exit 0":
        os._exit(0)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "crash":
        ctypes.string_at(0)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "hang":
        wait_for_ever()
    if how == "reduce":
        dist.all_reduce(torch.ones(2))


def wait_for_ever() -> None:
    signal.pause()


def negated(tensor: torch.Tensor) -> torch.Tensor:
    return -tensor


def speak(characters: int) -> None:
    print("x" * characters)


def return_a_lambda() -> object:
    return lambda: None


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def check_recovered(pool: RankPool) -> None:
    """The next job works, and the last one left neither a process nor a file."""
    assert pool(2).run(summed, 1.0) == [(0, 3.0), (1, 3.0)]
    zygote = pool.start()
    assert children(zygote.process.pid) == []
    assert [path.name for path in zygote.folder.iterdir()] == ["log"]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_results_come_in_rank_order(ranks, size):
    expected = 2.0 * 3.0 * size * (size + 1) / 2
    assert ranks(size).run(summed, 2.0, scale=3.0) == [(rank, expected) for rank in range(size)]


def test_ranks_know_their_place_and_share_a_seed(ranks):
    torch.manual_seed(1234)
    value = torch.rand(1).item()
    assert ranks(2).run(surroundings) == [
        (("0", "0", "2"), 1, value, False),
        (("1", "1", "2"), 1, value, False),
    ]


def test_a_job_of_4_ranks_is_cheap(ranks, record_property):
    ranks.start().ready()
    start = time.monotonic()
    ranks(4).run(summed, 1.0)
    seconds = time.monotonic() - start
    record_property("seconds", seconds)
    print(f"a job of 4 ranks took {seconds:.2f} s")
    assert seconds < 5.0  # 0.3 s alone on 2 cores; the rest is for a busy machine


@pytest.mark.parametrize(
    ("how", "story"),
    [
        ("raise", "rank 1: raised ValueError: --seq-length 7 is odd"),
        ("exit", "rank 1: exited with code 3 before it returned a result"),
        ("exit 0", "rank 1: exited with code 0 before it returned a result"),
        ("kill", "rank 1: died of SIGKILL before it returned a result"),
        ("crash", "rank 1: died of SIGSEGV before it returned a result"),
    ],
)
def test_a_failure_is_told_at_once_and_first(ranks, how, story):
    check_recovered(ranks)  # imports, before the time is taken
    start = time.monotonic()
    with pytest.raises(
        RanksFailed, match=re.escape(f"3 of 3 ranks failed; first {story}")
    ) as failure:
        ranks(3).run(fail_on_rank_1, how, others="reduce")
    assert time.monotonic() - start < 10.0  # of the 60 s a job may take
    text = str(failure.value)
    assert re.findall("=== rank (.)", text)[0] == "1"
    assert text.count(": lost a peer") == 2
    assert f"output of rank 1\nabout to {how}" in text
    first = text.split("=== rank ")[1]
    assert ("in fail_on_rank_1" in first) == (how in ("raise", "crash"))
    check_recovered(ranks)


def test_ranks_that_wait_for_one_that_raised_are_ended_and_shown(ranks):
    check_recovered(ranks)  # imports, before the time is taken
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="first rank 1: raised ValueError") as failure:
        ranks(2).run(fail_on_rank_1, "raise", others="hang")
    assert time.monotonic() - start < 10.0
    assert "=== rank 0: did not end by itself" in str(failure.value)
    assert "in wait_for_ever" in str(failure.value)
    check_recovered(ranks)


@pytest.mark.parametrize(
    ("how", "place"),
    [("hang", "in wait_for_ever"), pytest.param("stop", "", marks=pytest.mark.slow)],
)
def test_a_hang_is_ended_at_the_time_limit(ranks, how, place):
    check_recovered(ranks)  # imports, before the time is taken
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="first rank 1: did not end by itself") as failure:
        ranks(2).run(fail_on_rank_1, how, others="reduce", timeout=3)
    assert time.monotonic() - start < 8.0
    first, _, second = str(failure.value).partition("=== rank 0: lost a peer")
    assert place in first
    assert "Timed out waiting" in second
    check_recovered(ranks)


def test_a_rank_that_left_a_collective_out_is_named(ranks):
    with pytest.raises(RanksFailed, match="rank 0: lost a peer") as failure:
        ranks(2).run(fail_on_rank_1, "return", others="reduce", timeout=3)
    assert "=== rank 1: returned" in str(failure.value)


@pytest.mark.slow
def test_large_arguments_and_results_pass(ranks):
    big = torch.arange(50 * 2**20 // 8)
    for result in ranks(2).run(negated, big):
        assert torch.equal(result, -big)


def test_small_output_is_shown(ranks, capsys):
    ranks(2).run(speak, 5)
    assert (
        capsys.readouterr().out == "--- output of rank 0\nxxxxx\n\n--- output of rank 1\nxxxxx\n\n"
    )
    ranks(2).run(speak, QUIET_OUTPUT)
    assert capsys.readouterr().out == ""


def test_a_result_that_cannot_travel_is_an_error(ranks):
    with pytest.raises(RanksFailed, match=r"raised .*lambda"):
        ranks(1).run(return_a_lambda)


def test_wrong_use_is_refused(ranks):
    with pytest.raises(ValueError, match="1 to 8 ranks"):
        ranks(9)
    with pytest.raises((AttributeError, pickle.PicklingError), match="<lambda>"):
        ranks(1).run(lambda: None)


def test_an_edited_test_module_is_read_again(ranks, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "edited_module.py"
    source.write_text("def answer():\n    return 1\n")
    module = importlib.import_module("edited_module")
    assert ranks(1).run(module.answer) == [1]
    source.write_text("def answer():\n    return 22\n")
    assert ranks(1).run(module.answer) == [22]
    source.write_text("def answer(:\n")
    with pytest.raises(RanksFailed, match="raised SyntaxError"):
        ranks(1).run(module.answer)
    check_recovered(ranks)
