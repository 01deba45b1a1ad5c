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
        ("#### \u22125", "5", 0),
        ("#### \u22125", "-5", 1),
        (r"\boxed{\frac{3}{4}}", "3", 0),
        (r"\boxed{\frac{3}{4}}", "0.75", 1),
        (r"\boxed{1\frac{1}{2}}", "1.5", 1),
        (r"\boxed{-\frac{1}{2}}", "0.5", 0),
        (r"\boxed{70\,000}", "70", 0),
        (r"\boxed{70\,000}", "70000", 1),
        ("The answer is 5 + 7 = 12.", "12", 1),
        ("The answer is 5 + 7 = 12.", "5", 0),
        ("The answer is 4 = 5.", "5", 0),
        ("#### 18 or 19 or 20", "18", 0),
        ("#### 18 or 19 or 20", "20", 0),
        ("the answer is between 5 and 7", "5", 0),
        ("The answer is not 5. We get 7.", "5", 0),
        ("The answer is not 5. We get 7.", "7", 1),
        ("The answer is 5. No, the answer is not 5.", "5", 0),
        ("#### 42\n" + "x" * 8500, "42", 1),
        ("#### 42\n" + "1 " * 4250, "42", 1),
        ("#### 42 " + "so " * 3000, "42", 1),
        ("The answer is $5.", "5", 1),
        (r"\boxed{2^{10}}", "2", 0),
        (r"\boxed{5\sqrt{2}}", "5", 0),
        (r"\boxed{3x}", "3", 0),
        (r"\boxed{5\text{ cm}^2}", "5", 1),
        (r"\boxed{3\times 10^{8}}", "300000000", 1),
        ("it is 2^10", "10", 0),
        ("#### 1.234.567", "1.234", 0),
        ("#### 60 km/h", "60", 1),
    ],
)
def test_numeric(response, answer, right):
    assert numeric(response, answer=answer).reward == right


@given(st.fractions(-(10**9), 10**9, max_denominator=999), st.text("ab .,", max_size=9))
def test_any_fraction_is_read_as_it_was_written(value, before):
    assert read_number(str(value)) == value
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


@pytest.mark.parametrize(
    "answer", ["seven", r"\frac{1}{2}", "10^6", "1e999", "18 or 19", "5 cm", "1/0", "9" * 41]
)
def test_a_known_answer_that_is_not_one_number_is_an_error(answer):
    with pytest.raises(ValueError, match="is not one number that the verifier numeric reads"):
        numeric("7", answer=answer)


@pytest.mark.parametrize("answer", ["1,234", "1{,}234", r"1\,234", "$1,234.00", "1234%", "2468/2"])
def test_known_answers_that_are_numbers(answer):
    assert read_number(answer) == 1234


def test_verifiers_by_name():
    with Verifiers(RewardConfig(math_workers=1)) as verify:
        assert VERIFIER_NAMES == ("exact", "numeric", "math")
        assert verify("exact", "a", answer="a") == Verdict(reward=1.0, answer="a")
        assert verify("numeric", "so 7.0", answer="7").reward == 1
        assert verify("math", r"\boxed{x}", answer="x").reward == 1
