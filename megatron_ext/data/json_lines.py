"""Lines of JSON from files that nobody has checked: one strict reader for all of them.

A line ends with a line feed and nothing else, as JSON texts may hold U+2028 and the like.  Refused
are values that other readers understand differently or later code cannot write: keys given twice,
NaN and infinity, halves of surrogate pairs, deep nesting, numbers of thousands of digits.
NUL characters (`\\u0000`) are text like any other.
Invariant the tests check: any bytes are a value or a `BadRecord` with its reason, in memory that
does not grow with a line's length beyond MAX_LINE_BYTES.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_LINE_BYTES = 16 * 2**20
"""Longest line that is read; about four million tokens of text."""
MAX_DEPTH = 100
"""Objects and lists inside each other."""
_BOM = b"\xef\xbb\xbf"
_SHORT = reprlib.Repr(maxstring=60, maxother=60, maxlevel=2)


class BadRecord(ValueError):
    """A line that cannot be used; says why."""


def shown(value: object) -> str:
    """A value for a message, shortened."""
    return _SHORT.repr(value)


def numbered_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line) of a file's lines that are not blank.

    Of a line over MAX_LINE_BYTES only the first MAX_LINE_BYTES + 1 are given, for `parse_object` to
    refuse.
    """
    with Path(path).open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            rest = line if len(line) > MAX_LINE_BYTES else b""
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(2**20)
            text = line.removeprefix(_BOM)
            if text and not text.isspace():
                yield number, text


def parse_object(line: bytes | str) -> dict[str, Any]:
    """The JSON object of one line.

    Raises:
        BadRecord: it is none, or nothing that is accepted.
    """
    if len(line) > MAX_LINE_BYTES:
        raise BadRecord(f"is longer than {MAX_LINE_BYTES >> 20} MiB: split it")
    value = parse_value(line)
    if not isinstance(value, dict):
        raise BadRecord(f"is {kind_of(value)}, not an object")
    return value


def parse_value(text: bytes | str) -> Any:
    """The JSON value of a text, UTF-8 if it is bytes, with or without a byte order mark.

    Raises:
        BadRecord: it is none, or nothing that is accepted.
    """
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_without_repeats,
        )
    except UnicodeDecodeError as error:
        raise BadRecord(f"is not UTF-8 (byte {error.start + 1} of the line)") from error
    except json.JSONDecodeError as error:
        raise BadRecord(f"is not JSON ({error.msg}, column {error.colno})") from error
    except RecursionError as error:
        raise BadRecord(f"is nested deeper than {MAX_DEPTH} levels") from error
    except BadRecord:  # of the functions below, a ValueError too
        raise
    except ValueError as error:  # whole numbers of over 4,300 digits
        raise BadRecord("holds a number of thousands of digits") from error
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _refuse_depth(value)
    if "\\ud" in text or "\\uD" in text:
        _refuse_half_characters(value)
    return value


def kind_of(value: object) -> str:
    """What a JSON value is, as JSON calls it."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
    return "an object"


def _refuse_constant(name: str) -> None:
    raise BadRecord(f"holds {name}, which is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise BadRecord(f"holds {digits[:20]}, beyond the largest number (about 1.8e308)")
    return number


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = set[str]()
        twice = next(name for name, _ in pairs if name in names or names.add(name))
        raise BadRecord(f"has the key {shown(twice)} twice: keep one")
    return found


def _refuse_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [v.values() if isinstance(v, dict) else v for v in level]
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise BadRecord(f"is nested deeper than {MAX_DEPTH} levels")


def _refuse_half_characters(value: Any) -> None:
    """JSON may escape half of a surrogate pair, which no tokenizer can encode."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRecord(
            "has half of a surrogate pair (\\ud800 to \\udfff), which is no character"
        ) from error
