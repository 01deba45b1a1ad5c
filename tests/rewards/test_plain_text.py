"""The verifiers exact and numeric."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.rewards.base import Verdict
from megatron_ext.rewards.config import RewardConfig
from megatron_ext.rewards.plain_text import exact, numeric, read_number
from megatron_ext.rewards.verifiers import VERIFIER_NAMES, Verifiers


@pytest.mark.parametrize(
    ("response", "right"), [("yes", 1), (" yes\n", 1), ("Yes", 0), ("yes.", 0), ("", 0)]
)
def test_exact(response, right):
    assert exact(response, answer="yes ").reward == right


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("so 48/2 = 24 and 48 + 24 = 72.\n#### 72", "72", 1),
        ("#### 1,234", "1234", 1),
        ("she pays $18.50", "18.5", 1),
        ("it is 3/4 of it", "0.75", 1),
        ("-5", "5", 0),
        ("7-5", "5", 1),
        ("the answer is 42 of 50", "42", 1),
        ("the answer is 42 of 50", "50", 0),
        (r"thus \boxed{10{,}000} in 3 steps", "10000", 1),
        ("72 and then 71", "72", 0),
        ("1, 2, 3", "123", 0),
        ("50%", "50", 1),
        ("5km", "5", 1),
        ("x2", "2", 0),
        ("1e3", "1000", 1),
        ("1/0", "1", 0),
        ("no number", "0", 0),
        ("", "0", 0),
        ("9" * 41, "9", 0),
    ],
)
def test_numeric(response, answer, right):
    assert numeric(response, answer=answer).reward == right


@given(st.fractions(-(10**9), 10**9, max_denominator=999), st.text("ab .,", max_size=9))
def test_any_fraction_is_read_as_it_was_written(value, before):
    assert read_number(f"{before} {value}") == value
    assert numeric(f"{before} {value}", answer=str(value)).reward == 1


@given(st.integers(-(10**12), 10**12))
def test_commas_between_thousands_do_not_matter(value):
    assert read_number(f"{value:,}") == value


@given(st.text("0123456789,./-+$eE {}#", max_size=60))
def test_any_text_has_a_verdict(text):
    assert numeric(text, answer="7").reward in (0, 1)
    assert isinstance(read_number(text), Fraction | None)


def test_long_texts_take_no_time():
    started = time.process_time()
    for part in ("1", "1,", "1,111", "-", "1/", "1e", " "):
        numeric(part * 20_000, answer="7")
    assert time.process_time() - started < 2


def test_an_answer_without_a_number_is_an_error():
    with pytest.raises(ValueError, match="holds no number: use the verifier exact or math"):
        numeric("7", answer="seven")


def test_verifiers_by_name():
    with Verifiers(RewardConfig(math_workers=1)) as verify:
        assert VERIFIER_NAMES == ("exact", "numeric", "math")
        assert verify("exact", "a", answer="a") == Verdict(reward=1.0, answer="a")
        assert verify("numeric", "so 7.0", answer="7").reward == 1
        assert verify("math", r"\boxed{x}", answer="x").reward == 1


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, None),
        ({"math_workers": 0}, "--math-workers 0 leaves"),
        ({"math_time_limit": float("nan")}, "--math-time-limit nan leaves"),
        ({"math_memory_limit": -1}, "--math-memory-limit -1 leaves"),
    ],
)
def test_options(options, problem):
    found = RewardConfig(**options).problems()
    assert [p[: len(problem)] for p in found] == [problem] if problem else found == []
