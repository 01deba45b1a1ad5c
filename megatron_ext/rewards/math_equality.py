r"""Whether two mathematical answers are equal, by math-verify, with what it gets wrong put right.

Put right before it reads an answer: thousands in thin spaces (`1\,234`), repeating decimals
(`0.\overline{3}`), `1.5e3`, a full stop at the end.  After it: it rounds to six decimals, so to it
all numbers under 5e-7 are equal; and it ignores a percent sign after 2, but not after 2.5.
Only the worker processes import this: sympy takes a second, and some inputs take for ever.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import sympy
from math_verify import parse, verify

RELATIVE_TOLERANCE = 1e-6
"""Between decimal fractions; what math-verify's six decimals are for numbers near one."""

_THIN_SPACE = r"(?:\\[,;:! ]|~|,\\!|\{,\})"
_THOUSANDS = re.compile(rf"(?<![\d.])\d{{1,3}}(?:{_THIN_SPACE}\d{{3}})+(?!\d)")
_EXPONENT = re.compile(r"(?<![\w.\\])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?!\w)")
_PERCENT = re.compile(r"\s*\\?%$")
_REPEATING = re.compile(r"(?<![\w.])(\d{1,20})\.(\d{0,20})\\overline\s*\{(\d{1,20})\}")


def are_equal(answer: str, *, gold: str) -> bool:
    """Whether `answer` means the same as `gold`, both LaTeX without dollar signs or a box.

    May take any time and memory, or exhaust the stack: call it where that can be ended.
    """
    texts = normalized(answer), normalized(gold)
    if _same(*texts):
        return True
    bare = [_PERCENT.sub("", text) for text in texts]
    return (bare[0] != texts[0]) != (bare[1] != texts[1]) and _same(*bare)


def normalized(answer: str) -> str:
    """LaTeX that math-verify reads as it was meant."""
    text = answer.strip().rstrip(".").strip()
    text = _THOUSANDS.sub(lambda m: re.sub(_THIN_SPACE, "", m.group()), text)
    text = _EXPONENT.sub(r"\1\\times 10^{\2}", text)
    return _REPEATING.sub(_as_fraction, text)


def _as_fraction(match: re.Match[str]) -> str:
    whole, fixed, repeating = match.groups()
    numerator = int(whole + fixed + repeating) - int(whole + fixed)
    return rf"\frac{{{numerator}}}{{{(10 ** len(repeating) - 1) * 10 ** len(fixed)}}}"


def _same(answer: str, gold: str) -> bool:
    stated, expected = (
        # None is documented to mean "no time limit"; its annotation says int
        parse(rf"\boxed{{{text}}}", parsing_timeout=None)  # pyright: ignore[reportArgumentType]
        for text in (answer, gold)
    )
    if not expected or not stated:
        return False
    same = verify(expected, stated, allow_set_relation_comp=True, timeout_seconds=None)
    return same and not _differ_when_small(expected, stated)


def _differ_when_small(expected: Sequence[object], stated: Sequence[object]) -> bool:
    """Whether two numbers are equal to six decimals only because both are small."""
    a, b = expected[0], stated[0]
    if not isinstance(a, sympy.Expr) or not isinstance(b, sympy.Expr) or a == b:
        return False
    if a.free_symbols or b.free_symbols:
        return False
    x, y = (sympy.Abs(value.doit()).evalf(20) for value in (a, b))
    if not (x.is_Float and y.is_Float) or max(x, y) > 1e-2:
        return False
    difference = sympy.Abs((a.doit() - b.doit()).evalf(20))
    return bool(difference > RELATIVE_TOLERANCE * max(x, y))
