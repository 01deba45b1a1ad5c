"""The legal values of a number, declared once: the check, its message and the help come from it.

    max_turns: int = ranged(0, at_least=0, note="0 = no limit")    # a field of a room's config

Not-a-number is never legal, infinity only where a range says so, and whole numbers end at 2**31 - 1
unless it says otherwise: larger ones overflow somewhere between Python and the device.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from math import inf, isfinite
from typing import Any

LARGEST_INT = 2**31 - 1
LARGEST_FLOAT = 1e30
"""Far from where a product of two overflows what fp32 holds for one."""
SMALLEST_FLOAT = 1e-30
"""What "above 0" means for a fraction: less is 0 in fp32, sooner or later."""
_METADATA = "range"


class BadOptions(ValueError):
    """Options that cannot be used; `problems` has a sentence for each."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n  ".join(self.problems))


@dataclass(frozen=True, kw_only=True)
class Range:
    """An interval; a limit that is None is the one of the number's kind."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    with_infinity: bool = False
    """Infinity is legal as well."""
    also: tuple[float, ...] = ()
    """Legal values outside the interval."""
    note: str = ""
    """Why, or which value turns it off: ends the message."""

    def __contains__(self, value: float) -> bool:
        if value in self.also or (self.with_infinity and value == inf):
            return True
        return self._is_number(value) and not self._is_low(value) and not self._is_high(value)

    @property
    def interval(self) -> str:
        """The declared limits in words."""
        low = next(
            (
                f"{word} {limit:g}"
                for word, limit in (("at least", self.at_least), ("above", self.above))
                if limit is not None
            ),
            "",
        )
        high = next(
            (
                f"{word} {limit:.12g}"
                for word, limit in (("at most", self.at_most), ("below", self.below))
                if limit is not None
            ),
            "",
        )
        if self.at_least is not None and self.at_most is not None:
            text = f"from {self.at_least:.12g} to {self.at_most:.12g}"
        else:
            text = " and ".join(part for part in (low, high) if part) or "finite"
        others = [f"{value:g}" for value in (*self.also, *([inf] if self.with_infinity else []))]
        return ", or ".join([text, *others])

    def problem(self, flag: str, value: float) -> str | None:
        """What is wrong with an option's value, as a sentence; None = nothing."""
        if value in self:
            return None
        end = f" ({self.note})." if self.note else "."
        if not self._is_number(value):
            return f"{flag} {value} is not a finite number: it must be {self.interval}{end}"
        if self.at_most is None and self.below is None and self._is_high(value):
            return (
                f"{flag} {value} is too large: it must be at most {self._ceiling(value):.12g}{end}"
            )
        if self.above == 0 and value > 0 and self._is_low(value):
            return f"{flag} {value} is 0 in fp32: it must be at least {SMALLEST_FLOAT:g}{end}"
        return f"{flag} {value} must be {self.interval}{end}"

    def nearest(self, value: float) -> float:
        """A legal value in its place, for checks that look at several options."""
        if value in self:
            return value
        low = self.at_least if self.above is None else self.above + 1
        if self._is_number(value) and self._is_high(value):
            return self._ceiling(value) if self.below is None else (low or 0)
        return self.also[0] if low is None and self.also else (low or 0)

    def _is_number(self, value: float) -> bool:
        return isinstance(value, int) or isfinite(value)

    def _ceiling(self, value: float) -> float:
        if self.at_most is not None:
            return self.at_most
        return LARGEST_INT if isinstance(value, int) else LARGEST_FLOAT

    def _is_high(self, value: float) -> bool:
        return value > self._ceiling(value) or (self.below is not None and value >= self.below)

    def _is_low(self, value: float) -> bool:
        if self.above is not None:
            least = SMALLEST_FLOAT if self.above == 0 and isinstance(value, float) else 0
            return value <= self.above or value < least
        floor = self.at_least if self.at_least is not None else -LARGEST_FLOAT
        return value < floor


def ranged(default: Any, **limits: Any) -> Any:
    """A dataclass field with a default and the limits of its `Range`."""
    return field(default=default, metadata={_METADATA: Range(**limits)})


def ranges_of(config: type) -> dict[str, Range]:
    """The ranges that a dataclass declares, by field."""
    return {f.name: f.metadata[_METADATA] for f in fields(config) if _METADATA in f.metadata}


def range_problems(
    values: Mapping[str, Any],
    ranges: Mapping[str, Range],
    *,
    flags: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """A sentence for each value outside its range, by name; None = not given, a list = each of it.

    flags: of names that are not their flag's words.
    """
    found = {}
    for name, legal in ranges.items():
        value = values.get(name)
        flag = (flags or {}).get(name) or flag_of(name)
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int | float) and (sentence := legal.problem(flag, number)):
                found[name] = sentence
    return found


def flag_of(name: str) -> str:
    """The flag of a field."""
    return f"--{name.replace('_', '-')}"


class Ranged:
    """Base of a config: making one with a value outside its range raises `BadOptions`."""

    def __post_init__(self) -> None:
        if wrong := self.wrong_values():
            raise BadOptions(wrong)

    def wrong_values(self) -> list[str]:
        """A sentence for each value that is wrong by itself."""
        return list(range_problems(vars(self), ranges_of(type(self))).values())


def in_range(kind: type[int] | type[float], **limits: Any) -> Callable[[str], float]:
    """A `type` for argparse: a number in a range, or an error that says the range."""
    legal = Range(**limits)

    def read(word: str) -> float:
        try:
            value = kind(word)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{word!r} is not {what}") from None
        if sentence := legal.problem("", value):
            raise argparse.ArgumentTypeError(sentence.strip())
        return value

    return read
