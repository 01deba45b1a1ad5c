"""Math-Verify's own test cases, read from a checkout of its repository, graded by it and by us.

A case is a known answer, a response and whether they agree; what our verifier decides otherwise
than Math-Verify, where Math-Verify is right by its table, must be in `KNOWN_DIFFERENCES`.
"""

from __future__ import annotations

import ast
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_REASONS = {
    "a comma as a decimal sign is read as a list: 1,22 may be 1 and 22": (
        "test_all::test_number_extraction[5]",
        "test_all::test_number_extraction[6]",
        "test_all::test_number_extraction[17]",
    ),
    "the response states no answer: no box, no 'answer is', more than a formula": (
        "test_all::test_number_extraction[7]",
        "test_all::test_number_extraction[13]",
        "test_all::test_number_extraction[14]",
        "test_all::test_number_extraction[15]",
        "test_all::test_number_extraction[16]",
        "test_all::test_math_extraction_edge_cases[0]",
        "test_all::test_math_extraction_edge_cases[1]",
        "test_all::test_math_extraction_edge_cases[2]",
        "test_all::test_math_extraction_additional_cases[8]",
        "test_numina_cases::test_numina_cases[24]",
    ),
    "the answer contradicts itself (7 = 11)": (
        "test_all::test_relations_math[10]",
        "test_all::test_relations_math[12]",
        "test_all::test_relations_math[13]",
        "test_all::test_relations_math[26]",
        "test_all::test_relations_math[27]",
    ),
    "the known answer is no formula: 1 = 0, a box that is never closed, two boxes for one": (
        "test_all::test_relations_math[21]",
        "test_boxed::test_boxed[0]",
    ),
    "an escaped dollar sign is a dollar, not the end of a formula": (
        "test_all::test_latex_notation[9]",
    ),
    "the statement is a sentence of words, not only a number": (
        "test_all::test_math_extraction_additional_cases[1]",
    ),
    "a box is the answer, whatever is said after it": (
        "test_all::test_math_extraction_additional_cases[17]",
    ),
    "x in [-2, 7] and -2 <= x <= 7 are the same set; the table has that option off": (
        "test_all::test_set_rel_assymetry[3]",
    ),
    "the table is wrong: 1 - 1/e is not 1 + 1/e": ("test_yujianll::test_string_extraction[9]",),
}
KNOWN_DIFFERENCES = {case: reason for reason, cases in _REASONS.items() for case in cases}
"""Case -> why our verifier decides otherwise than Math-Verify and its table."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of a table; id: file, test and number of the row."""

    id: str
    gold: str
    response: str
    right: bool


def read_cases(checkout: Path) -> list[Case]:
    """The rows with a gold answer, a prediction and a verdict of all tests of a checkout."""
    cases = []
    for path in sorted((checkout / "tests").glob("test_*.py")):
        for test, names, rows in _tables(path):
            if names[:2] != ["gold", "pred"]:
                continue
            verdict = next(i for i, name in enumerate(names) if name in ("expected", "result"))
            cases += [
                Case(
                    id=f"{path.stem}::{test}[{number}]",
                    gold=row[0],
                    response=row[1],
                    right=bool(row[verdict]),
                )
                for number, row in enumerate(rows)
            ]
    return cases


def _tables(path: Path) -> Iterator[tuple[str, list[str], list[tuple]]]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        for mark in node.decorator_list:
            if isinstance(mark, ast.Call) and len(mark.args) == 2:
                names, rows = map(_value, mark.args)
                yield node.name, [name.strip() for name in names.split(",")], rows


def _value(node: ast.expr) -> Any:
    """A literal, also one with a square root in an f-string; nothing of the checkout is run."""
    match node:
        case ast.List(elts=parts):
            return [_value(part) for part in parts]
        case ast.Tuple(elts=parts):
            return tuple(_value(part) for part in parts)
        case ast.Call(func=ast.Name(id="LatexExtractionConfig" | "StringExtractionConfig")):
            return []
        case ast.JoinedStr(values=parts):
            return "".join(_value(part) for part in parts)
        case ast.FormattedValue(
            value=ast.Call(
                func=ast.Attribute(value=ast.Name(id="math"), attr="sqrt"),
                args=[ast.Constant(value=float() | int() as number)],
            ),
            format_spec=ast.JoinedStr() as spec,
        ):
            return format(math.sqrt(number), _value(spec))
    return ast.literal_eval(node)


def by_math_verify(case: Case) -> bool:
    """Whether Math-Verify alone pays, with its defaults and boxes first, as its tests do."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    gold, stated = (parse(text, targets) for text in (case.gold, case.response))
    return verify(gold, stated)


def by_us(case: Case, grade: Callable[[str, str], float]) -> bool:
    """Whether `grade(response, gold)` pays; the gold answer is what its text states."""
    from megatron_ext.rewards.final_answer import final_answer, unwrapped

    gold = unwrapped(case.gold)
    if "boxed" in gold or gold == case.gold.strip():
        gold = final_answer(case.gold) or gold
    try:
        return grade(case.response, gold) == 1
    except ValueError:  # it is no known answer
        return False


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How often each verifier decides as the table says."""

    right_alone: int
    right_ours: int
    worse: list[str]
    """Cases that Math-Verify alone decides rightly and we do not."""

    @staticmethod
    def is_known(case: str) -> bool:
        """Whether a case is listed with its reason."""
        return case in KNOWN_DIFFERENCES


def compare(cases: list[Case], grade: Callable[[str, str], float]) -> Comparison:
    """Grade all cases by Math-Verify alone and by `grade(response, gold)`."""
    logging.disable(logging.CRITICAL)  # it warns of every answer that it gives up
    alone = [by_math_verify(case) == case.right for case in cases]
    logging.disable(logging.NOTSET)
    ours = [by_us(case, grade) == case.right for case in cases]
    worse = [c.id for c, a, b in zip(cases, alone, ours, strict=True) if a and not b]
    return Comparison(right_alone=sum(alone), right_ours=sum(ours), worse=worse)
