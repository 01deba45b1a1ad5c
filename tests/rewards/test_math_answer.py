"""The verifier of mathematical answers: right values, and a verdict in bounded time on anything."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_ext.rewards import math_worker
from megatron_ext.rewards.base import Verdict
from megatron_ext.rewards.config import RewardConfig
from megatron_ext.rewards.math_answer import MathVerifier
from tests.rewards import math_cases

FORKS = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # beside threads
COT = Path(__file__).parents[3] / "shared" / "data" / "math_cot_100.jsonl"


@pytest.fixture(scope="module")
def verify():
    """A verifier with the default limits."""
    with MathVerifier(RewardConfig()) as verifier:
        yield verifier


@pytest.mark.parametrize(("response", "answer", "right"), math_cases.ALL)
def test_pays(verify, response, answer, right):
    verdict = verify(response, answer=answer)
    assert (verdict.reward, verdict.error) == (right, None)


def test_known_answers_may_be_wrapped(verify):
    for answer in ("$\\frac{1}{2}$", r"\(\frac{1}{2}\)", r"\boxed{\frac{1}{2}}", " 1/2 "):
        assert verify(r"\boxed{0.5}", answer=answer).reward == 1


@pytest.mark.parametrize("answer", ["", "  ", "1" * 2001])
def test_a_known_answer_that_is_none_is_an_error(verify, answer):
    with pytest.raises(ValueError, match="needs 1 to 2000"):
        verify(r"\boxed{5}", answer=answer)


@pytest.mark.parametrize(
    "answer", ["$", "$$", r"\frac{1}{", r"\boxed{}", "5+", "(1,2", r"\frac{1}"]
)
def test_a_known_answer_that_cannot_be_read_is_an_error(verify, answer):
    with pytest.raises(ValueError, match="cannot be read"):
        verify(r"\boxed{5}", answer=answer)


@pytest.mark.parametrize("answer", math_cases.HUGE)
def test_huge_numbers_earn_nothing_at_once(verify, answer):
    started = time.monotonic()
    assert verify(rf"\boxed{{{answer}}}", answer="7") == Verdict(reward=0.0, answer=answer)
    assert verify(rf"\boxed{{{answer}}}", answer=answer).reward == 1
    assert time.monotonic() - started < 10  # the load of others


def test_long_responses_have_a_verdict(verify):
    for response in ("1+" * 50_000, r"\boxed{" + "(" * 100_000, "$" + "x+" * 900 + "1$"):
        assert verify(response, answer="7").reward == 0


@pytest.fixture(scope="module")
def hasty():
    """A verifier that gives an answer a quarter of a CPU second."""
    with MathVerifier(RewardConfig(math_workers=1, math_time_limit=0.25)) as verifier:
        verifier(r"\boxed{x}", answer="5")  # the worker has started
        yield verifier


@pytest.mark.parametrize("answer", math_cases.ENDLESS)
def test_endless_answers_earn_nothing_and_cost_their_limit(hasty, answer):
    started = time.monotonic()
    verdict = hasty(rf"\boxed{{{answer}}}", answer="7")
    assert verdict.reward == 0
    assert verdict.error is not None and "took over" in verdict.error
    assert time.monotonic() - started < 10  # 1 s by its own clock limit, plus the load of others
    assert hasty(r"\boxed{\frac{1}{2}}", answer="0.5") == Verdict(reward=1.0, answer=r"\frac{1}{2}")


@pytest.mark.parametrize("answer", math_cases.STRANGE, ids=range(len(math_cases.STRANGE)))
def test_strange_answers_earn_nothing(hasty, answer):
    assert hasty(rf"\boxed{{{answer}}}", answer="7").reward == 0


def _grow(connection) -> None:
    math_worker._limit_growth(64 * 2**20)
    sizes = []
    try:
        for mib in (16, 256):
            sizes.append(len(bytearray(mib * 2**20)) // 2**20)
    except MemoryError:
        connection.send(sizes)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit address space")
@FORKS
def test_memory_is_bounded():
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_grow, args=(theirs,))
    child.start()
    theirs.close()
    assert ours.recv() == [16]
    child.join()


def test_works_from_many_threads(verify):
    verdicts: list[float] = []

    def work(number: int) -> None:
        answer = rf"\boxed{{\frac{{{2 * number}}}{{4}}}}"
        verdicts.append(verify(answer, answer=str(number / 2)).reward)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == [1.0] * 12


@pytest.mark.slow
def test_a_lost_worker_costs_its_answer_only_and_no_process_is_left():
    with MathVerifier(RewardConfig(math_workers=1)) as verify:
        assert verify(r"\boxed{\frac{1}{2}}", answer="0.5").reward == 1
        (worker,) = verify._workers
        worker._process.kill()
        lost = verify(r"\boxed{\frac{1}{2}}", answer="0.5")
        assert (lost.reward, lost.error is None) == (0, False)
        assert verify(r"\boxed{\frac{1}{2}}", answer="0.5").reward == 1
        group = worker._process.pid
        os.killpg(group, 0)
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


def _verify_once(verify: MathVerifier, connection) -> None:
    connection.send(verify(r"\boxed{\frac{1}{2}}", answer="0.5").reward)
    verify.close()


@FORKS
def test_a_forked_copy_has_workers_of_its_own(hasty):
    assert hasty(r"\boxed{\frac{1}{2}}", answer="0.5").reward == 1
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_verify_once, args=(hasty, theirs))
    child.start()
    theirs.close()
    assert ours.recv() == 1
    child.join()
    assert hasty(r"\boxed{\frac{2}{4}}", answer="0.5").reward == 1


@pytest.mark.skipif(not COT.is_file(), reason="shared/data/math_cot_100.jsonl is not there")
def test_agrees_with_the_scores_of_800_real_responses(verify):
    """All but one, and that stored score is wrong: it takes 10000 for other than 10{,}000."""
    differing = [
        (record["gt"], verdict)
        for record in map(json.loads, COT.read_text().splitlines())
        for response, score in zip(record["code"], record["score"], strict=True)
        if (verdict := verify(response, answer=record["gt"])).reward != score
    ]
    assert differing == [("10{,}000", Verdict(reward=1.0, answer="10000"))]
