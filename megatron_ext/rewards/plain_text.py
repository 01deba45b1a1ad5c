r"""Verifiers that need no mathematics: the same text, and the same number.

`numeric` reads one number of this grammar, and pays nothing for what it cannot read:

    number    sign? currency? digits decimals? exponent? (/ digits)? %?
              sign? \frac{digits}{digits}
              digits \frac{digits}{digits}  |  number \times 10^{digits}
    sign      - + or U+2212 and other dashes, right before the number
    digits    70000, or groups of three: 70,000  70{,}000  70,\!000  70\,000
    decimals  .5 ; a comma is never a decimal sign
    currency  $ \$ € £ ; they and a percent sign do not matter
    exponent  e3, E-3: at most 308

A known answer is one number of the first kind and nothing else.  A response's number is
- where `final_answer` finds a statement: its only number; the one after the last "="; or the first,
  if words part it from the next (`42 of 50`), but not "or", "and", "to", a comma or an operator;
- else the last number after the last "the answer is not x".
Not covered: formulas, units with a meaning, numbers of over 40 characters (they match nothing).
"""

from __future__ import annotations

import re
from fractions import Fraction

from megatron_ext.rewards.base import Verdict
from megatron_ext.rewards.final_answer import final_answer, unretracted

NOT_ONE_NUMBER = (
    "is not one number that the verifier numeric reads: write one like 1234.5 or 3/4, or use the "
    "verifier math or exact."
)

_SLASH = "\u2044"
"""Of a fraction that stands alone, while a text is read."""
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_VALUE = rf"(?P<digits>{_DIGITS}(?:\.\d+)?|\.\d+)(?P<exponent>[eE][-+]?\d{{1,3}}(?!\w))?"
_KNOWN = re.compile(
    rf"(?P<sign>[-+])?\s?[$€£]?\s?(?P<minus>-)?{_VALUE}(?:\s?/\s?(?P<divisor>\d+))?\s?%?\.?"
)
_NUMBER = re.compile(
    r"(?<![\w.^])(?:(?<!\d)(?<!\d )(?P<sign>[-+])\s?)?[$€£]?\s?(?P<minus>(?<=[$€£])-)?"
    rf"(?:(?P<whole>\d{{1,20}})[ ]?(?=\d{{1,20}}\u2044))?{_VALUE}"
    r"(?:\s?[/\u2044]\s?(?P<divisor>\d+))?(?:\s?\*\s?10\^\{?(?P<power>-?\d{1,3})\}?(?!\d))?"
)  # fmt: skip
_LONGEST_NUMBER = 40
_MAX_EXPONENT = 308
_SPELLINGS = (
    (re.compile("[\u2212\u2010\u2011\u2013\ufe63\uff0d]"), "-"),
    (re.compile(r"(?<=\d)(?:\{,\}(?:\\!)?|,\\!|\\[,;:! ]|[\u202f\u2009]) ?(?=\d{3}(?!\d))"), ","),
    (re.compile(r"(?<=\d)\s?(?:\\times|\\cdot|\u00d7)\s?(?=10\^)"), "*"),
    (re.compile(r"\\[$%]"), lambda match: match.group()[1]),
    (re.compile(r"\\(?:left|right|displaystyle)(?![a-zA-Z])|\\[,;:!() \[\]]|~"), " "),
    (re.compile(r"\\[dt]?frac\s?\{\s?(\d{1,40})\s?\}\s?\{\s?(\d{1,40})\s?\}"), rf" \1{_SLASH}\2 "),
    (re.compile(r"(?:\^\s?\{?\s?\\circ\s?\}?|°)"), " "),
    (re.compile(r"(?<=[a-zA-Z}])\s?\^\{?[23]\}?(?!\d)"), " "),
    (re.compile(r"\\(?:text|textbf|mathrm|mbox|mathbf)\s?\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"(?<!\w)-\s+(?=\d+\u2044)"), "-"),
)
_EQUALS = re.compile(r"(?<![<>!])=|\\approx|≈")
_WORD = re.compile(r"[a-zA-Z]{2,}")
_JOINING = frozenset(("or", "and", "to", "through", "plus", "minus", "times", "until", "versus"))
_UNREAD = re.compile(r"\\[a-zA-Z]+|\.\d|[\^_!*+<>|/\\\u00b7\u00d7\u00f7]")
_LETTER_AFTER = re.compile(r"\s?[a-zA-Zπ](?![a-zA-Z])")
_UNIT_LETTERS = frozenset("mgshlLKCFJNWVAdk")


def exact(response: str, *, answer: str) -> Verdict:
    """1 where the response is the answer, but for white space around it."""
    stated = response.strip()
    return Verdict(reward=float(stated == answer.strip()), answer=stated or None)


def numeric(response: str, *, answer: str) -> Verdict:
    """1 where the number the response ends with, or states, is the answer's (see above).

    Raises:
        ValueError: `answer` is not one number.
    """
    expected = read_number(answer)
    if expected is None:
        raise ValueError(f"the answer {answer[:40]!r} {NOT_ONE_NUMBER}")
    stated = final_answer(response, formulas=False)
    if stated is None:
        found = _numbers(_spelled(unretracted(response)))[-1:]
        match = found[0] if found and not _is_part(found[0]) else None
    else:
        match = _stated(_spelled(stated))
    if match is None:
        return Verdict(reward=0.0)
    return Verdict(reward=float(_value(match) == expected), answer=match.group().strip())


def read_number(text: str) -> Fraction | None:
    """The number that a text is; None = it is not one number."""
    plain = text.strip()
    for pattern, spelling in _SPELLINGS[:2]:
        plain = pattern.sub(spelling, plain)
    match = _KNOWN.fullmatch(plain.replace(r"\$", "$").replace(r"\%", "%"))
    return _value(match) if match else None


def _spelled(text: str) -> str:
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    return text


def _numbers(text: str) -> list[re.Match[str]]:
    return list(_NUMBER.finditer(text))


def _is_part(match: re.Match[str]) -> bool:
    """Whether a number is only part of a formula, such as a power."""
    return bool(
        re.match(r"\s?[\^!]|\.\d|[a-zA-Z]*\\?_", match.string[match.end() : match.end() + 9])
    )


def _stated(text: str) -> re.Match[str] | None:
    """The one number of a statement; None = it states none, or several."""
    sides = [_single(side) for side in _EQUALS.split(text)]
    stated = sides[-1] or (sides[0] if len(sides) == 2 else None)
    if stated is None:
        return None
    bare = [side for side in sides if side and side.group().strip() == side.string.strip()]
    return stated if all(_value(side) == _value(stated) for side in bare) else None


def _single(text: str) -> re.Match[str] | None:
    numbers = _numbers(text)
    if not numbers:
        return None
    first = numbers[0]
    if len(numbers) > 1:
        between = text[first.end() : numbers[1].start()]
        words = set(_WORD.findall(between.lower()))
        if not words or words & _JOINING:
            return None
        after = between
    else:
        after = text[first.end() :]
    letter = _LETTER_AFTER.match(after)
    if letter and letter.group()[-1] not in _UNIT_LETTERS:
        return None
    around = text[: first.start()] + " " + re.sub(r"(?<=[a-zA-Z])\s?/\s?(?=[a-zA-Z])", " ", after)
    return None if _UNREAD.search(around) else first


def _value(match: re.Match[str]) -> Fraction | None:
    """A number as a fraction; None = too long, too large, or divided by zero."""
    parts = match.groupdict()
    divisor, exponent, power = (parts.get(k) for k in ("divisor", "exponent", "power"))
    if len(match.group()) > _LONGEST_NUMBER or (divisor and int(divisor) == 0):
        return None
    if abs(int((exponent or "e0")[1:])) > _MAX_EXPONENT or abs(int(power or 0)) > _MAX_EXPONENT:
        return None
    value = Fraction(f"{match['digits'].replace(',', '')}{exponent or ''}") / int(divisor or 1)
    value = (value + int(parts.get("whole") or 0)) * Fraction(10) ** int(power or 0)
    return -value if "-" in ((match["sign"] or "") + (match["minus"] or "")) else value
