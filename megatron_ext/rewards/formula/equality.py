r"""Whether two expressions are equal: exactly, else in many digits, else at many points.

- Rational numbers are compared as fractions.  A decimal equals what is not written as one if it is
  its rounding, with at least six decimals and six digits that count: 0.333333 is 1/3, 0.333 is not.
- Other constants must agree in all of the 40 to 400 digits that they are worked out in.
- With symbols, they must agree at eight points (the same ones each time) of positive and negative
  numbers, where both are real; and be defined at three at least.
- A logarithm without a base is natural or decimal, whichever makes them equal.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from megatron_ext.rewards.formula.nodes import Node
from megatron_ext.rewards.formula.values import Evaluator, NoValue, exact

MIN_DECIMALS = 6
"""Of a decimal that may stand for a number that is none."""
NUM_POINTS = 8
_DIGITS = 40


@dataclass(frozen=True, kw_only=True)
class _Decimal:
    """A number as it was written, with decimals."""

    value: Fraction
    unit: Fraction
    """Worth of its last digit."""
    is_fine: bool
    """Whether it has enough digits to stand for a number that it rounds."""


def equal(a: Node, b: Node) -> bool:
    """Whether two expressions have the same value; False where one has none."""
    if a == b:
        return True
    try:
        rational = _equal_rationals(a, b)
        if rational is not None:
            return rational
        names = a.symbols() | b.symbols()
        if not names:
            return _equal_constants(a, b)
    except NoValue:
        return False
    return _equal_functions(a, b, names)


def ordered(a: Node, b: Node) -> bool | None:
    """Whether a constant is less than another; None = they are equal, or no real numbers."""
    signs = []
    for node in (a, b):
        inner = node.args[0] if node.kind == "neg" else node
        if inner == Node("constant", value="infinity"):
            signs.append(-1 if node.kind == "neg" else 1)
        else:
            signs.append(0)
    if signs[0] or signs[1]:
        return None if signs[0] == signs[1] else signs[0] < signs[1]
    if a.symbols() or b.symbols() or equal(a, b):
        return None
    try:
        evaluator = Evaluator({}, digits=_DIGITS)
        x, y = evaluator.value(a), evaluator.value(b)
    except NoValue:
        return None
    if evaluator.context.im(x) or evaluator.context.im(y):
        return None
    return bool(evaluator.context.re(x) < evaluator.context.re(y))


def proportional(a: Node, b: Node, *, positive: bool) -> bool:
    """Whether a is b times a number that is not 0 (positive: that is over 0), at all points."""
    names = a.symbols() | b.symbols()
    ratios = []
    for x, y in _values_at_points(a, b, names):
        if x is None or y is None:
            continue
        if abs(y) < 1e-25 or abs(x) < 1e-25:
            if max(abs(x), abs(y)) > 1e-20:
                return False
            continue
        ratios.append(x / y)
    if len(ratios) < 3:
        return False
    if positive and not (ratios[0].imag == 0 and ratios[0].real > 0):
        return False
    return all(abs(ratio - ratios[0]) <= 1e-20 * abs(ratios[0]) for ratio in ratios)


def _equal_rationals(a: Node, b: Node) -> bool | None:
    x, y = exact(a), exact(b)
    written = _decimal(a), _decimal(b)
    if written[0] is None and written[1] is None:
        return None if x is None and y is None else (x == y if None not in (x, y) else None)
    if x is not None and x == y:
        return True
    coarse = [d for d in written if d is not None and d.is_fine]
    if not coarse:
        return False if x is not None and y is not None else None
    decimal = max(coarse, key=lambda d: d.unit)
    other = (y if decimal is written[0] else x) if x is not None and y is not None else None
    if other is None:
        other = _digits_of(b if decimal is written[0] else a)
    return other is not None and abs(other - decimal.value) * 2 <= decimal.unit


def _digits_of(node: Node) -> Fraction | None:
    """A real constant in digits, as a fraction; None = it is none."""
    if node.symbols():
        return None
    evaluator = Evaluator({}, digits=_DIGITS)
    value = evaluator.value(node)
    if evaluator.context.im(value):
        return None
    return Fraction(str(evaluator.context.nstr(evaluator.context.re(value), 30)))


def _decimal(node: Node) -> _Decimal | None:
    """The decimal that a node is: 1.5, -1.5, 1.5 times a power of ten."""
    if node.kind == "neg":
        inner = _decimal(node.args[0])
        return inner and _Decimal(value=-inner.value, unit=inner.unit, is_fine=inner.is_fine)
    if node.kind == "number" and "." in node.value:
        whole, _, decimals = node.value.partition(".")
        digits = len((whole + decimals).lstrip("0"))
        return _Decimal(
            value=Fraction(node.value),
            unit=Fraction(1, 10 ** len(decimals)),
            is_fine=len(decimals) >= MIN_DECIMALS and digits >= MIN_DECIMALS,
        )
    if node.kind == "mul" and (first := _decimal(node.args[0])) is not None:
        power = node.args[1]
        if power.kind == "pow" and power.args[0] == Node("number", value="10"):
            scale = exact(power)
            if scale is not None:
                return _Decimal(
                    value=first.value * scale, unit=first.unit * scale, is_fine=first.is_fine
                )
    return None


def _equal_constants(a: Node, b: Node) -> bool:
    readings = ("ln", "log10") if _has_bare_log(a) or _has_bare_log(b) else ("ln",)
    return any(_agree_in_digits(a, b, reading) for reading in readings)


def _agree_in_digits(a: Node, b: Node, reading: str) -> bool:
    digits = _DIGITS
    for _ in range(2):
        evaluator = Evaluator({}, digits=digits)
        evaluator = Evaluator(_log_scale(evaluator, reading), digits=digits)
        difference = abs(evaluator.value(a) - evaluator.value(b))
        size = evaluator.largest_bits
        if difference > evaluator.context.ldexp(1, size) * evaluator.context.mpf(10) ** (
            10 - digits
        ):
            return False
        digits = _DIGITS + int(size * 0.7)
    return True


def _log_scale(evaluator: Evaluator, reading: str) -> dict[str, Any]:
    mp = evaluator.context
    return {"log": 1 / mp.log(10) if reading == "log10" else mp.mpf(1)}


def _has_bare_log(node: Node) -> bool:
    return any(n.kind == "call" and n.value == "log" and len(n.args) == 1 for n in node.walk())


def _equal_functions(a: Node, b: Node, names: frozenset[str]) -> bool:
    readings = ("ln", "log10") if _has_bare_log(a) or _has_bare_log(b) else ("ln",)
    return any(_agree_at_points(_values_at_points(a, b, names, r)) for r in readings)


def _agree_at_points(pairs: Sequence[tuple[Any, Any]]) -> bool:
    known = [(x, y) for x, y in pairs if x is not None and y is not None]
    if len(known) < 3:
        return False
    return all(abs(x - y) <= 1e-25 * max(abs(x), abs(y), 1) for x, y in known)


def _values_at_points(
    a: Node, b: Node, names: frozenset[str], reading: str = "ln"
) -> list[tuple[Any, Any]]:
    """Both values at each point; at real points only, unless there are too few of them."""
    real: list[tuple[Any, Any]] = []
    all_points: list[tuple[Any, Any]] = []
    for number in range(NUM_POINTS):
        start = Evaluator({}, digits=_DIGITS)
        evaluator = Evaluator(
            _log_scale(start, reading) | _point(start, sorted(names), number), digits=_DIGITS
        )
        try:
            pair = evaluator.value(a), evaluator.value(b)
        except NoValue:
            continue
        all_points.append(pair)
        if evaluator.is_real:
            real.append(pair)
    return real if len(real) >= 3 else all_points


def _point(evaluator: Evaluator, names: Sequence[str], number: int) -> dict[str, Any]:
    """Values of the symbols: positive at the first points, of either sign at the others."""
    point = {}
    for name in names:
        draw = random.Random(f"{name} {number}")
        value = Fraction(draw.randint(1, 999_983), 1_000_003) + (number % 2)
        if number >= NUM_POINTS // 2 and draw.random() < 0.6:
            value = -value
        point[name] = evaluator.context.mpf(value.numerator) / value.denominator
    return point
