r"""Kinds of answers with words: units, bases, degrees, money, names; see grader_kinds."""

from __future__ import annotations

from fractions import Fraction

from tools.benchmarks.grader_kinds import Kind, integer

_UNITS = {
    "cm": (
        "\\text{ cm}",
        "\\mathrm{cm}",
        "\\text{ centimeters}",
        " \\mbox{ cm}",
        "\\,\\mathrm{cm}",
    ),
    "inch": ("\\text{ inches}", "\\text{ in}", "\\mbox{ inches}", " inches"),
    "m/s": ("\\text{ m/s}", "\\,\\mathrm{m/s}", "\\text{ meters per second}"),
    "cm2": ("\\text{ cm}^2", "\\text{ square centimeters}", "\\mathrm{cm}^{2}", "\\text{ sq cm}"),
    "cm3": ("\\text{ cm}^3", "\\text{ cubic centimeters}", "\\mathrm{~cm}^3"),
    "hour": ("\\text{ hours}", "\\text{ hr}", " hours", "\\textrm{ hours}"),
    "minute": ("\\text{ minutes}", "\\text{ min}", " minutes"),
    "mile": ("\\text{ miles}", " miles", "\\textnormal{ miles}"),
    "mph": ("\\text{ mph}", "\\text{ miles per hour}"),
    "cent": ("\\text{ cents}", " cents"),
    "apple": ("\\text{ apples}", " apples"),
}
_NAMES = (
    "Evelyn",
    "Monday",
    "Tuesday",
    "Navin",
    "ellipse",
    "circle",
    "even",
    "odd",
    "June 20",
    "May 7",
)


def _quantity(n: int, unit: str) -> list[str]:
    return [*(f"{n}{name}" for name in _UNITS[unit]), f"{n}", f"{n}.0{_UNITS[unit][0]}"]


def _base(n: int, base: int) -> list[str]:
    digits, rest = "", n
    while rest:
        digits, rest = "0123456789ABCDEF"[rest % base] + digits, rest // base
    name = {
        2: "two",
        3: "three",
        4: "four",
        5: "five",
        6: "six",
        7: "seven",
        8: "eight",
        9: "nine",
    }.get(base, "")
    found = [f"{digits}_{{{base}}}", f"({digits})_{{{base}}}", f"{digits} _{{{base}}}"]
    found += [f"{digits}_{base}"] if base < 10 else []
    return (
        [*found, f"{digits}_{{\\text{{{name}}}}}", f"{digits}_\\text{{{name}}}"] if name else found
    )


def _degrees(n: int) -> list[str]:
    return [
        f"{n}^\\circ",
        f"{n}^{{\\circ}}",
        f"{n}°",
        f"{n}",
        f"{n}\\text{{ degrees}}",
        f"{n}\\degree",
        f"{n} degrees",
        f"{n}\\,^\\circ",
    ]


def _percent(n: int) -> list[str]:
    return [
        f"{n}\\%",
        f"{n}%",
        f"{n} \\%",
        f"{n}",
        f"{n}\\text{{ percent}}",
        f"{n} percent",
        f"{n}.0\\%",
    ]


def _dollars(n: int, cents: int) -> list[str]:
    amount = f"{n:,}.{cents:02d}"
    plain = amount.replace(",", "")
    return [
        f"\\${plain}",
        plain,
        f"\\${amount}",
        f"\\${amount.replace(',', '{,}')}",
        f"{plain}\\text{{ dollars}}",
        f"{amount} dollars",
        f"\\$ {plain}",
    ]


def _assignment(n: int, name: str) -> list[str]:
    return [
        f"{name}={n}",
        f"{name} = {n}",
        f"{n}",
        f"{name}={n}.0",
        f"{name} = \\frac{{{2 * n}}}{{2}}",
    ]


def _time_span(h: int, m: int) -> list[str]:
    return [
        f"{h}\\text{{ hours }}{m}\\text{{ minutes}}",
        f"{h}\\text{{ hr }}{m}\\text{{ min}}",
        f"{h} \\text{{ hours}}\\ {m} \\text{{ minutes}}",
    ]


def _colors(a: int, b: int) -> list[str]:
    return [
        f"{a}\\text{{ red and }}{b}\\text{{ blue}}",
        f"{a}\\text{{ red}}, {b}\\text{{ blue}}",
        f"{b}\\text{{ blue and }}{a}\\text{{ red}}",
    ]


def _ratio(a: int, b: int) -> list[str]:
    return [f"{a}:{b}", f"{a} : {b}", f"{a}\\colon {b}"]


def _clock(h: int, m: int, half: str) -> list[str]:
    return [
        f"{h}:{m:02d}\\text{{ {half}.m.}}",
        f"{h}:{m:02d} \\text{{ {half}m}}",
        f"{h}:{m:02d} {half}.m.",
        f"{h}:{m:02d}",
    ]


def _name(index: int) -> list[str]:
    word = _NAMES[index % len(_NAMES)]
    return [
        f"\\text{{{word}}}",
        f"\\text{{ {word}}}",
        f"\\textbf{{{word}}}",
        f"\\mbox{{{word}}}",
        f"\\text{{{word.lower()}}}",
    ]


def _letter(index: int) -> list[str]:
    letter = "ABCDEF"[index % 6]
    return [
        f"\\text{{({letter})}}",
        letter,
        f"({letter})",
        f"\\textbf{{({letter})}}",
        f"\\mathrm{{{letter}}}",
        f"\\text{{{letter}}}",
    ]


WITH_WORDS = [
    Kind(
        name="base",
        draw=lambda r: (r.randint(5, 9999), r.choice((2, 3, 4, 5, 6, 7, 8, 9, 12, 16))),
        spell=_base,
    ),
    Kind(name="unit", draw=lambda r: (r.randint(2, 500), r.choice(list(_UNITS))), spell=_quantity),
    Kind(name="degrees", draw=lambda r: (r.randint(1, 359),), spell=_degrees),
    Kind(name="percent", draw=lambda r: (r.randint(101, 199),), spell=_percent),
    Kind(name="dollars", draw=lambda r: (r.randint(1, 99999), r.randint(0, 99)), spell=_dollars),
    Kind(name="assignment", draw=lambda r: (integer(r), r.choice("xyznk")), spell=_assignment),
    Kind(
        name="hours and minutes",
        draw=lambda r: (r.randint(2, 9), r.randint(2, 59)),
        spell=_time_span,
    ),
    Kind(
        name="counts of two things", draw=lambda r: tuple(r.sample(range(2, 40), 2)), spell=_colors
    ),
    Kind(
        name="ratio",
        draw=lambda r: tuple(r.sample((2, 3, 5, 7, 11, 13, 17), 2)),
        spell=_ratio,
        means=Fraction,
    ),
    Kind(
        name="clock",
        draw=lambda r: (r.randint(1, 12), r.randint(0, 59), r.choice("ap")),
        spell=_clock,
    ),
    Kind(name="word", draw=lambda r: (r.randint(0, 9),), spell=_name, means=lambda i: i % 10),
    Kind(name="letter", draw=lambda r: (r.randint(0, 5),), spell=_letter, means=lambda i: i % 6),
]
