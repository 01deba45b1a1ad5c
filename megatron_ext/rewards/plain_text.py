"""Verifiers that need no mathematics: the same text, and the same number.

Not covered: formulas, units with a meaning, numbers of over 40 characters (they match nothing).
"""

from __future__ import annotations

import re
from fractions import Fraction

from megatron_ext.rewards.base import Verdict
from megatron_ext.rewards.final_answer import final_answer

_NUMBER = re.compile(
    r"(?<![\w.])(?P<sign>[-+]\s?)?\$?(?P<digits>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
    r"(?P<exponent>[eE][-+]?\d{1,3}(?!\w))?(?:\s?/\s?(?P<divisor>\d+))?"
)
_LONGEST_NUMBER = 40


def exact(response: str, *, answer: str) -> Verdict:
    """1 where the response is the answer, but for white space around it."""
    stated = response.strip()
    return Verdict(reward=float(stated == answer.strip()), answer=stated or None)


def numeric(response: str, *, answer: str) -> Verdict:
    """1 where the number the response ends with is the answer's.

    The response's number is the first one of its stated answer (`final_answer`), or the last one of
    a response that states none.  Commas between digits, a currency sign and a percent sign do not
    matter; 1/2 and 0.5 are the same.

    Raises:
        ValueError: `answer` holds no number.
    """
    expected = read_number(answer)
    if expected is None:
        raise ValueError(f"the answer {answer!r} holds no number: use the verifier exact or math.")
    stated = final_answer(response)
    numbers = _numbers(response if stated is None else stated)
    if not numbers:
        return Verdict(reward=0.0)
    text, number = numbers[-1 if stated is None else 0]
    return Verdict(reward=float(number == expected), answer=text)


def read_number(text: str) -> Fraction | None:
    """The first number of a text; None = it holds none."""
    numbers = _numbers(text)
    return numbers[0][1] if numbers else None


def _numbers(text: str) -> list[tuple[str, Fraction | None]]:
    """Each number of a text as written and as a value; None = too long, or divided by zero."""
    plain = text.replace("{,}", ",").replace(r",\!", ",")
    return [(match.group().strip(), _value(match)) for match in _NUMBER.finditer(plain)]


def _value(match: re.Match[str]) -> Fraction | None:
    divisor = match["divisor"]
    if len(match.group()) > _LONGEST_NUMBER or (divisor and int(divisor) == 0):
        return None
    digits = match["digits"].replace(",", "")
    value = Fraction(f"{(match['sign'] or '').strip()}{digits}{match['exponent'] or ''}")
    return value / int(divisor) if divisor else value
