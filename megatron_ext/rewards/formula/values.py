r"""What an expression is worth: an exact fraction where it has one, else many digits.

The digits asked for grow with the largest number that occurs on the way, so that
`\frac{10^{30}+1}{10^{30}}` is not taken for 1.  Numbers over 2^MAX_BITS are not worked out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import mpmath

from megatron_ext.rewards.formula.nodes import Node, UnknownFormula

MAX_BITS = 60_000
"""Of a number that is worked out exactly."""
MAX_NUMERIC_BITS = 6_000
"""Of a number that occurs in an expression worked out in digits."""


class NoValue(ArithmeticError):
    """There is none: a division by zero, an infinity, a number too large to work out."""


def exact(node: Node) -> Fraction | None:
    """The value, if it is rational by whole powers and the four operations alone; else None.

    Raises:
        NoValue: there is none.
    """
    if node.kind == "number":
        return Fraction(node.value)
    if node.kind == "call" and node.value in ("factorial", "binomial", "abs", "floor", "ceiling"):
        return _exact_call(node.value, [exact(argument) for argument in node.args])
    if node.kind not in ("neg", "add", "mul", "div", "pow"):
        return None
    values = [exact(argument) for argument in node.args]
    if any(value is None for value in values):
        return None
    a, b = values[0], values[-1]
    assert a is not None and b is not None
    if node.kind == "neg":
        return -a
    if node.kind == "add":
        return _bounded(a + b)
    if node.kind == "mul":
        return _bounded(a * b)
    if node.kind == "div":
        if b == 0:
            raise NoValue("a division by zero")
        return _bounded(a / b)
    return _exact_power(a, b)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise NoValue("a number too large to work out")
    return value


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1:
        return None
    if base == 0 and exponent <= 0:
        raise NoValue("zero to the power of nothing or less")
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(base) != 1 and abs(exponent) * size > MAX_BITS:
        raise NoValue("a number too large to work out")
    if abs(base) == 1:
        return base if exponent % 2 else Fraction(1)
    return base ** int(exponent)


def _exact_call(name: str, values: list[Fraction | None]) -> Fraction | None:
    if any(value is None for value in values):
        return None
    first, last = values[0], values[-1]
    assert first is not None and last is not None
    if name == "abs":
        return abs(first)
    if name in ("floor", "ceiling"):
        return Fraction(math.floor(first) if name == "floor" else math.ceil(first))
    if any(v is None or v.denominator != 1 or not 0 <= v <= 5000 for v in values):
        raise NoValue("no whole number, or one too large")
    if name == "factorial":
        return Fraction(math.factorial(int(first)))
    return _bounded(Fraction(math.comb(int(first), int(last))))


class Evaluator:
    """Works expressions out in digits, for given values of their symbols."""

    def __init__(self, symbols: Mapping[str, Any], *, digits: int) -> None:
        self.context = mpmath.MPContext()
        self.context.dps = digits
        self._symbols = symbols
        self.largest_bits = 1
        """Size of the largest number, or smallest, that occurred."""
        self.is_real = True
        """Whether no root or logarithm of a negative number occurred."""

    def value(self, node: Node) -> Any:
        """The value, a real or complex number of `context`.

        Raises:
            NoValue: there is none, or it is too large.
            UnknownFormula: a part has no value at all.
        """
        try:
            result = self._value(node)
        except (ZeroDivisionError, OverflowError, ValueError) as error:
            if isinstance(error, UnknownFormula):
                raise
            raise NoValue(str(error)) from error
        if not self.context.isfinite(result):
            raise NoValue("it is infinite")
        return result

    def _value(self, node: Node) -> Any:
        mp = self.context
        if node.kind == "number":
            number = Fraction(node.value)
            return self._noted(mp.mpf(number.numerator) / number.denominator)
        if node.kind == "symbol":
            return self._symbols[node.value]
        if node.kind == "constant":
            values = {"pi": mp.pi, "e": mp.e, "i": mp.mpc(0, 1)}
            if node.value not in values:
                raise NoValue(f"{node.value} is no number")
            return +values[node.value]
        values = [self._value(argument) for argument in node.args]
        return self._noted(self._operation(node, values))

    def _operation(self, node: Node, values: list[Any]) -> Any:
        if node.kind == "neg":
            return -values[0]
        if node.kind == "add":
            return values[0] + values[1]
        if node.kind == "mul":
            return values[0] * values[1]
        if node.kind == "div":
            return values[0] / values[1]
        if node.kind == "degrees":
            return values[0] * self.context.pi / 180
        if node.kind == "pow":
            return self._power(values[0], values[1])
        if node.kind == "root":
            return self._root(values[0], values[1])
        if node.kind == "call":
            return self._call(node.value, values)
        raise UnknownFormula(f"{node.kind} has no value")

    def _noted(self, value: Any) -> Any:
        if value != 0:
            bits = abs(int(self.context.mag(value)))
            if bits > MAX_NUMERIC_BITS:
                raise NoValue("a number too large to work out")
            self.largest_bits = max(self.largest_bits, bits)
        return value

    def _power(self, base: Any, exponent: Any) -> Any:
        mp = self.context
        if base != 0 and abs(exponent) * (abs(mp.log(base)) + 1) > 2 * MAX_NUMERIC_BITS:
            raise NoValue("a power too large to work out")
        if _is_negative(mp, base) and not mp.isint(exponent):
            self.is_real = False
        return mp.power(base, exponent)

    def _root(self, inside: Any, degree: Any) -> Any:
        mp = self.context
        is_odd = mp.isint(degree) and int(mp.re(degree)) % 2 == 1
        if _is_negative(mp, inside):
            if is_odd:
                return -mp.power(-inside, 1 / degree)
            self.is_real = False
        return mp.power(inside, 1 / degree) if degree != 2 else mp.sqrt(inside)

    def _call(self, name: str, values: list[Any]) -> Any:
        mp = self.context
        if name in ("ln", "log"):
            return self._logarithm(name, values)
        if name.startswith("?"):
            return self._unknown_function(name, values)
        if name in ("gcd", "lcm"):
            raise UnknownFormula(f"\\{name} is not worked out")
        if name in ("arcsin", "arccos") and abs(values[0]) > 1:
            self.is_real = False
        if name in ("factorial", "binomial") and max(abs(v) for v in values) > 5000:
            raise NoValue("a number too large to work out")
        known = {
            "abs": abs, "floor": mp.floor, "ceiling": mp.ceil, "factorial": mp.factorial,
            "binomial": mp.binomial, "exp": lambda x: self._power(+mp.e, x),
            "arcsin": mp.asin, "arccos": mp.acos, "arctan": mp.atan,
            "cis": lambda x: mp.mpc(mp.cos(x), mp.sin(x)),
        }  # fmt: skip
        function = known.get(name) or getattr(mp, name)
        if name in ("sinh", "cosh", "exp") and abs(values[0]) > MAX_NUMERIC_BITS:
            raise NoValue("a number too large to work out")
        return function(*values)

    def _logarithm(self, name: str, values: list[Any]) -> Any:
        mp = self.context
        if any(_is_negative(mp, value) for value in values):
            self.is_real = False
        if len(values) == 2:
            return mp.log(values[0]) / mp.log(values[1])
        scale = self._symbols.get("log", 1) if name == "log" else 1
        return mp.log(values[0]) * scale

    def _unknown_function(self, name: str, values: list[Any]) -> Any:
        """A number that depends on nothing but the function and its rounded arguments."""
        mp = self.context
        inner = sum(mp.mpf(index + 2) * value for index, value in enumerate(values))
        return mp.sin(inner + sum(map(ord, name))) + mp.mpf("1.7")


def _is_negative(mp: Any, value: Any) -> bool:
    return mp.im(value) == 0 and mp.re(value) < 0
