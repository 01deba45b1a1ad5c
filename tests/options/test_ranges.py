"""A number's range: what it holds, what it says, and what stands in for a value outside it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from math import inf, isfinite, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.options.ranges import (
    LARGEST_INT,
    BadOptions,
    Range,
    Ranged,
    in_range,
    range_problems,
    ranged,
)

SIZE, RATE = Range(at_least=1), Range(at_least=0, note="0 turns it off")
RANGES = {
    "1": SIZE,
    "0": RATE,
    "(0": Range(above=0),
    "[0,1)": Range(at_least=0, below=1),
    "(0,1]": Range(above=0, at_most=1),
    "0 or >1": Range(above=1, also=(0,)),
    "inf": Range(at_least=0, with_infinity=True),
    "any": Range(),
    "64 bits": Range(at_least=-(2**63), at_most=2**63 - 1),
}
OUTSIDE = {
    "1": [0, -1, LARGEST_INT + 1, 10**20, nan, inf],
    "0": [-1e-9, nan, inf, -inf, 1e308],
    "(0": [0.0, -1.0, 1e-320, nan],
    "[0,1)": [1.0, 1.5, -0.1, nan],
    "(0,1]": [0.0, 1.0000001, nan],
    "0 or >1": [0.5, 1.0, -0.5, inf, nan],
    "inf": [-1.0, nan, -inf],
    "any": [1e308, -1e308, inf, nan],
    "64 bits": [2**63, -(2**63) - 1],
}
INSIDE = {
    "1": [1, 7, LARGEST_INT],
    "0": [0.0, 1e-320, 1e30],
    "(0": [1e-30, 5],
    "[0,1)": [0, 0.0, 0.999],
    "(0,1]": [1e-6, 1],
    "0 or >1": [0, 1.0001, 3],
    "inf": [0, inf],
    "any": [-5, 1e30, -1e30],
    "64 bits": [2**63 - 1, 0],
}


@pytest.mark.parametrize("name", RANGES)
def test_a_range_has_its_limits_and_no_number_that_is_none(name):
    assert [v for v in OUTSIDE[name] if v in RANGES[name]] == []
    assert [v for v in INSIDE[name] if v not in RANGES[name]] == []


@given(
    name=st.sampled_from(list(RANGES)),
    value=st.one_of(st.integers(-(10**25), 10**25), st.floats(allow_nan=True)),
)
def test_what_stands_in_is_legal_and_a_legal_value_stands_for_itself(name, value):
    legal = RANGES[name]
    instead = legal.nearest(value)
    assert instead in legal
    assert (instead == value and legal.problem("--x", value) is None) == (value in legal)
    assert isfinite(instead) or instead == value


def test_a_message_names_flag_value_limit_and_what_turns_it_off():
    assert SIZE.problem("--n", 0) == "--n 0 must be at least 1."
    assert (
        SIZE.problem("--n", 10**20) == f"--n {10**20} is too large: it must be at most 2147483647."
    )
    assert RATE.problem("--r", -1.0) == "--r -1.0 must be at least 0 (0 turns it off)."
    said = RATE.problem("--r", nan)
    assert said == "--r nan is not a finite number: it must be at least 0 (0 turns it off)."
    assert RANGES["0 or >1"].problem("--c", 0.5) == "--c 0.5 must be above 1, or 0."
    assert RANGES["[0,1)"].interval == "at least 0 and below 1"
    assert RANGES["inf"].interval == "at least 0, or inf"


def test_lists_are_checked_one_by_one_and_none_is_not_given():
    found = range_problems({"a": [1, 0], "b": None, "c": 1}, {"a": SIZE, "b": SIZE, "d": SIZE})
    assert found == {"a": "--a 0 must be at least 1."}


@dataclass(frozen=True, kw_only=True)
class Config(Ranged):
    """Two numbers."""

    first_size: int = ranged(1, at_least=1)
    share: float = ranged(0.5, at_least=0, at_most=1)
    words: list[str] = field(default_factory=list)


def test_a_config_out_of_range_cannot_be_made_and_all_reasons_are_told():
    assert Config().share == 0.5
    with pytest.raises(BadOptions) as raised:
        Config(first_size=0, share=nan)
    assert [text.split()[0] for text in raised.value.problems] == ["--first-size", "--share"]


@pytest.mark.parametrize("word", ["0", "x", "1.5", str(10**20), "nan"])
def test_a_tool_reads_numbers_in_range(word, capsys):
    parser = argparse.ArgumentParser(prog="tool")
    parser.add_argument("--n", type=in_range(int, at_least=1))
    assert parser.parse_args(["--n", "3"]).n == 3
    with pytest.raises(SystemExit) as raised:
        parser.parse_args(["--n", word])
    assert raised.value.code == 2
    assert f"argument --n: {word}" in capsys.readouterr().err.replace("'", "")
