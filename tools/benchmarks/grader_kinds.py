r"""Kinds of mathematical answers: parameters, what they mean, and ways to write them.

What an answer means is worked out in Python from its parameters and never from its text, so that
whether two answers differ is known without the grader.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from fractions import Fraction
from math import gcd
from random import Random

Parameters = tuple
"""Numbers and names that one answer is made of."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of answer."""

    name: str
    draw: Callable[[Random], Parameters]
    spell: Callable[..., list[str]]
    """Ways to write the answer of these parameters; the first is the known answer."""
    means: Callable[..., Hashable] = lambda *parameters: parameters


def integer(rng: Random, low: int = 2, high: int = 99) -> int:
    """A number between the bounds, of either sign."""
    return rng.randint(low, high) * rng.choice((1, 1, -1))


def fraction_text(a: int, b: int, command: str = "frac") -> str:
    """A fraction, with its sign before it."""
    return f"{'-' if a < 0 else ''}\\{command}{{{abs(a)}}}{{{b}}}"


def _coprime(rng: Random) -> tuple[int, int]:
    while True:
        a, b = integer(rng, 1, 30), rng.randint(2, 30)
        if gcd(a, b) == 1:
            return a, b


def _fraction(a: int, b: int) -> list[str]:
    value = Fraction(a, b)
    a, b = value.numerator, value.denominator
    found = [
        fraction_text(a, b),
        fraction_text(a, b, "dfrac"),
        fraction_text(a, b, "tfrac"),
        f"{a}/{b}",
        f"\\frac{{{a}}}{{{b}}}",
    ]
    found += [f"\\frac{{{-a}}}{{-{b}}}", f"\\frac {{{a}}} {{{b}}}", f"\\frac{{{3 * a}}}{{{3 * b}}}"]
    if 0 < a < 10 and b < 10:
        found += [f"\\frac{a}{b}", f"\\frac {a}{b}", f"\\dfrac{a}{b}", f"\\frac{{{a}}}{b}"]
    if b in (2, 4, 5, 8, 10, 16, 20, 25):
        found.append(f"{float(value):.12f}".rstrip("0").rstrip("."))
    half = {(1, 2): "\u00bd", (3, 4): "\u00be", (2, 3): "\u2154", (1, 8): "\u215b"}.get((a, b))
    return [*found, half] if half else found


def _integer(n: int) -> list[str]:
    text = str(n)
    found = [
        text,
        f"{n}.0",
        f"+{text}" if n > 0 else text.replace("-", "\u2212"),
        f"{{{text}}}",
        f"({text})",
    ]
    if abs(n) >= 1000:
        grouped = f"{n:,}"
        found += [grouped, *(grouped.replace(",", gap) for gap in ("{,}", ",\\!", "\\,", "\\;"))]
    return found


def _mixed(whole: int, a: int, b: int) -> list[str]:
    improper = whole * b + a
    return [
        f"{whole}\\frac{{{a}}}{{{b}}}",
        f"{whole}\\dfrac{{{a}}}{{{b}}}",
        f"{whole} \\frac{{{a}}}{{{b}}}",
        f"\\frac{{{improper}}}{{{b}}}",
        f"{whole} {a}/{b}",
        f"{whole}+\\frac{{{a}}}{{{b}}}",
        f"{improper}/{b}",
    ]


def _surd(c: int, a: int, b: int) -> list[str]:
    sign = "+" if a > 0 else "-"
    k = "" if abs(a) == 1 else str(abs(a))
    left = "-" if a < 0 else ""
    return [
        f"{c}{sign}{k}\\sqrt{{{b}}}",
        f"{c} {sign} {k}\\sqrt{{{b}}}",
        f"{left}{k}\\sqrt{{{b}}}{c:+d}",
        f"{c}{sign}{k}√{b}",
        f"{c}{sign}{k}\\sqrt {{{b}}}",
        f"{c}{sign}\\sqrt{{{a * a * b}}}",
        f"{c} {sign} {k or 1} \\cdot \\sqrt{{{b}}}",
        f"{c}{sign}{k}\\sqrt[2]{{{b}}}",
        *([f"{c}{sign}{k}\\sqrt{b}", f"{c}{sign}{k}\\sqrt {b}"] if b < 10 else []),
    ]


def _pi(a: int, b: int) -> list[str]:
    value = Fraction(a, b)
    a, b = value.numerator, value.denominator
    top = {1: "\\pi", -1: "-\\pi"}.get(a, f"{a}\\pi")
    if b == 1:
        return [top, top.replace("\\pi", " \\pi"), top.replace("\\pi", "π"), f"{a} \\cdot \\pi"]
    found = [
        f"\\frac{{{top}}}{{{b}}}",
        f"{fraction_text(a, b)}\\pi",
        f"\\dfrac{{{top}}}{{{b}}}",
        f"{top}/{b}",
    ]
    found += [
        f"\\frac{{{top.replace(chr(92) + 'pi', 'π')}}}{{{b}}}",
        f"{fraction_text(a, b)} \\, \\pi",
    ]
    return [*found, f"\\frac\\pi{b}", f"\\frac \\pi {b}"] if a == 1 and b < 10 else found


def polynomial(*c: int) -> list[str]:
    """A polynomial in x with these coefficients, the constant one first."""

    def write(order, power: str, times: str = "") -> str:
        terms = []
        for degree in order:
            k = c[degree]
            if k:
                letter = ("", "x")[degree] if degree < 2 else "x" + power.format(degree)
                size = "" if abs(k) == 1 and letter else str(abs(k))
                terms.append(
                    ("-" if k < 0 else "+") + (size + (times if size and letter else "") + letter)
                )
        return "".join(terms).removeprefix("+") or "0"

    down, up = range(len(c) - 1, -1, -1), range(len(c))
    found = [
        write(down, "^{}"),
        write(up, "^{}"),
        write(down, "^{{{}}}"),
        write(down, "^{}", " \\cdot "),
    ]
    found += [write(down, "^{}").replace("+", " + ").replace("-", " - ").strip()]
    return [
        *found,
        write(down, "^{}").replace("^2", "²"),
        write(down, "^{}", "\\,"),
        f"\\left({found[1]}\\right)",
    ]


def _complex(a: int, b: int) -> list[str]:
    size = "" if abs(b) == 1 else str(abs(b))
    sign = "+" if b > 0 else "-"
    return [
        f"{a}{sign}{size}i",
        f"{a} {sign} {size}i",
        f"{a}{sign}{size}\\mathrm{{i}}",
        f"{'-' * (b < 0)}{size}i{a:+d}",
        f"{a}{sign}{size or 1} \\cdot i",
        f"{a}{sign}{size}\\text{{i}}",
        f"({a}{sign}{size}i)",
    ]


def _bracketed(opening: str, closing: str) -> Callable:
    def spell(*items: int) -> list[str]:
        texts = [str(i) for i in items]
        fractions = [f"\\frac{{{3 * i}}}{{3}}" for i in items]
        tight, loose = ",".join(texts), ", ".join(texts)
        return [
            f"{opening}{tight}{closing}",
            f"{opening}{loose}{closing}",
            f"\\left{opening}{tight}\\right{closing}",
            f"{opening} {loose} {closing}",
            f"{opening}{',~'.join(texts)}{closing}",
            f"{opening}{','.join(fractions)}{closing}",
            f"\\big{opening}{',\\,'.join(texts)}\\big{closing}",
        ]

    return spell


def _unordered(*items: int) -> list[str]:
    texts = [str(i) for i in items]
    rotated, reverse = texts[1:] + texts[:1], texts[::-1]
    return [
        ", ".join(texts),
        ",".join(reverse),
        ", ".join(rotated),
        f"\\{{{', '.join(reverse)}\\}}",
        f"{', '.join(texts[:-1])} \\text{{ and }} {texts[-1]}",
        f"{', '.join(texts[:-1])} and {texts[-1]}",
        "; ".join(rotated),
        f"x = {texts[0]} \\text{{ or }} x = {texts[1]}" if len(texts) == 2 else ", ".join(texts),
        "}, \\boxed{".join(texts),
        "} \\text{ and } \\boxed{".join(reverse),
    ]


def _set(*items: int) -> list[str]:
    texts = [str(i) for i in items]
    rotated, reverse = texts[1:] + texts[:1], texts[::-1]
    return [
        f"\\{{{','.join(texts)}\\}}",
        f"\\{{{', '.join(reverse)}\\}}",
        f"\\left\\{{{','.join(rotated)}\\right\\}}",
        f"\\lbrace {', '.join(texts)} \\rbrace",
        ", ".join(reverse),
        f"\\{{ {' , '.join(rotated)} \\}}",
    ]


NUMBERS_AND_SETS = [
    Kind(name="integer", draw=lambda r: (integer(r, 0, 10 ** r.randint(1, 7)),), spell=_integer),
    Kind(name="fraction", draw=_coprime, spell=_fraction, means=Fraction),
    Kind(
        name="mixed number",
        draw=lambda r: (r.randint(1, 20), r.randint(1, 6), r.randint(7, 12)),
        spell=_mixed,
        means=lambda w, a, b: w + Fraction(a, b),
    ),
    Kind(
        name="surd",
        draw=lambda r: (integer(r, 1, 20), integer(r, 1, 9), r.choice((2, 3, 5, 6, 7, 11, 13, 19))),
        spell=_surd,
    ),
    Kind(name="multiple of pi", draw=_coprime, spell=_pi, means=Fraction),
    Kind(
        name="polynomial",
        draw=lambda r: (
            integer(r),
            integer(r, 0, 12),
            integer(r, 1, 9),
            *((r.randint(1, 5),) * r.randint(0, 1)),
        ),
        spell=polynomial,
        means=lambda *c: c if c[-1] else c[:-1],
    ),
    Kind(
        name="complex number", draw=lambda r: (integer(r, 1, 30), integer(r, 1, 30)), spell=_complex
    ),
    Kind(
        name="pair", draw=lambda r: tuple(r.sample(range(-40, 60), 2)), spell=_bracketed("(", ")")
    ),
    Kind(
        name="triple", draw=lambda r: tuple(r.sample(range(-40, 60), 3)), spell=_bracketed("(", ")")
    ),
    Kind(
        name="list",
        draw=lambda r: tuple(r.sample(range(-40, 60), r.randint(2, 4))),
        spell=_unordered,
        means=lambda *x: frozenset(x),
    ),
    Kind(
        name="set",
        draw=lambda r: tuple(r.sample(range(-40, 60), r.randint(2, 4))),
        spell=_set,
        means=lambda *x: frozenset(x),
    ),
]
