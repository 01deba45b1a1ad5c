"""Right answers spelled otherwise are paid, wrong ones that differ by little are not.

All kinds and how they differ: tools/benchmarks/graders.py, which also runs more of them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_ext.rewards.config import RewardConfig
from megatron_ext.rewards.math_answer import MathVerifier
from tools.benchmarks import math_verify_table
from tools.benchmarks.graders import mutated, of_golds, respelled, wrong_verdicts

CHECKOUT = os.environ.get("MATH_VERIFY_CHECKOUT")
GOLDS = ["420", r"\frac{1}{9}", r"12\frac{3}{5}", "900,000,000", "10{,}000", "37.50", "-3969"]
GOLDS += [r"-\frac{40}{153}", "50,625"]


@pytest.fixture(scope="module")
def verify():
    """A verifier with one worker."""
    with MathVerifier(RewardConfig(math_workers=1)) as verifier:
        yield verifier


@pytest.mark.parametrize("cases", [respelled, mutated])
def test_some_of_each_kind(verify, cases):
    some = [*cases(4), *of_golds(iter(GOLDS))]
    assert len(some) > 180 and not wrong_verdicts(some, verify)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cases", [respelled, mutated])
def test_five_thousand(verify, cases):
    many = list(cases(160, seed=1))
    assert len({(c.gold, c.response) for c in many}) == len(many) > 5000
    assert not wrong_verdicts(many, verify)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(CHECKOUT is None, reason="MATH_VERIFY_CHECKOUT names no checkout")
def test_never_worse_than_math_verify_on_its_own_table_unless_listed(verify):
    cases = math_verify_table.read_cases(Path(CHECKOUT))
    found = math_verify_table.compare(cases, lambda r, g: verify(r, answer=g).reward)
    assert len(cases) > 200
    assert set(found.worse) <= set(math_verify_table.KNOWN_DIFFERENCES)
