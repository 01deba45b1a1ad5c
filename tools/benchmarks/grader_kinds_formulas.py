r"""Kinds of answers: lines, matrices, inequalities, powers, functions; see grader_kinds."""

from __future__ import annotations

from fractions import Fraction
from math import comb

from tools.benchmarks.grader_kinds import Kind, fraction_text, integer, polynomial


def _line(m: int, c: int) -> list[str]:
    right = polynomial(c, m)
    return [
        f"y={right[0]}",
        f"y = {right[4]}",
        f"y={right[1]}",
        f"{right[0]}=y",
        f"{2 * m}x-2y{2 * c:+d}=0",
        f"y{-c:+d}={m}x",
    ]


def _matrix(a: int, b: int, c: int, d: int) -> list[str]:
    def write(name: str, gap: str = " & ") -> str:
        return f"\\begin{{{name}}} {a}{gap}{b} \\\\ {c}{gap}{d} \\end{{{name}}}"

    return [
        write("pmatrix"),
        write("bmatrix"),
        write("pmatrix", "&"),
        f"\\left({write('matrix')}\\right)",
        f"\\begin{{pmatrix}} {a} & {b} \\\\ {c} & \\frac{{{2 * d}}}{{2}} \\end{{pmatrix}}",
        f"\\left[\\begin{{array}}{{cc}} {a} & {b} \\\\ {c} & {d} \\end{{array}}\\right]",
    ]


def _column(*entries: int) -> list[str]:
    rows = " \\\\ ".join(map(str, entries))
    return [
        f"\\begin{{pmatrix}} {rows} \\end{{pmatrix}}",
        f"\\begin{{bmatrix}}{rows}\\end{{bmatrix}}",
        f"\\begin{{pmatrix}}{rows} \\\\ \\end{{pmatrix}}",
    ]


def _more_than(a: int, sign: str) -> list[str]:
    mirrored = {">": "<", "<": ">", "\\ge": "\\le", "\\le": "\\ge"}[sign]
    closed = "[]" if sign in ("\\ge", "\\le") else "()"
    ray = f"{closed[0]}{a},\\infty)" if sign in (">", "\\ge") else f"(-\\infty,{a}{closed[1]}"
    return [
        f"x {sign} {a}",
        f"{a} {mirrored} x",
        ray,
        f"x\\in{ray}",
        f"-x {mirrored} {-a}",
        f"2x {sign} {2 * a}",
    ]


def _plus_minus(c: int, k: int, d: int) -> list[str]:
    root = f"{'' if k == 1 else k}\\sqrt{{{d}}}"
    return [
        f"{c} \\pm {root}",
        f"{c}\\pm{root}",
        f"{c} ± {root}",
        f"{c}+{root}, {c}-{root}",
        f"\\{{{c}-{root},{c}+{root}\\}}",
        f"{c}-{root} \\text{{ and }} {c}+{root}",
        f"x = {c} \\pm {root}",
    ]


def _scientific(a: int, n: int) -> list[str]:
    text = f"{a // 10}.{a % 10}"
    plain = (
        f"{float(Fraction(a, 10) * Fraction(10) ** n):.12f}"
        if n < 0
        else str(Fraction(a, 10) * 10**n)
    )
    found = [
        f"{text} \\times 10^{{{n}}}",
        f"{text}\\cdot 10^{{{n}}}",
        f"{text}e{n}",
        f"{text} \u00d7 10^{{{n}}}",
        f"{a} \\times 10^{{{n - 1}}}",
    ]
    return [*found, plain.rstrip("0").rstrip(".")] if n < 0 else [*found, plain]


def _power(base: int, exponent: int) -> list[str]:
    return [
        f"{base}^{{{exponent}}}",
        f"{base}^{exponent}" if 0 <= exponent < 10 else f"{base}^{{{exponent}}}",
        str(base**exponent),
        f"{base} \\cdot {base}^{{{exponent - 1}}}",
    ]


def _symbolic(a: int, b: int, letter: str) -> list[str]:
    top = f"{a}{letter}+{b}" if b > 0 else f"{a}{letter}{b}"
    return [
        f"\\frac{{{top}}}{{{letter}^2+1}}",
        f"\\dfrac{{{b}{a:+d}{letter}}}{{1+{letter}^{{2}}}}",
        f"({top})/({letter}^2+1)",
        f"\\frac{{{a}{letter}}}{{{letter}^2+1}}+\\frac{{{b}}}{{{letter}^2+1}}",
        f"\\left({top}\\right)\\left({letter}^2+1\\right)^{{-1}}",
    ]


def _trigonometric(k: int, name: str) -> list[str]:
    return [
        f"\\{name} {k}x",
        f"\\{name}({k}x)",
        f"\\{name}\\left({k}x\\right)",
        f"\\{name} ({k} x)",
        f"\\{name}{{{k}x}}",
        f"\\operatorname{{{name}}}({k}x)",
    ]


def _exponential(k: int, c: int) -> list[str]:
    return [
        f"e^{{{k}}}{c:+d}",
        f"\\mathrm{{e}}^{{{k}}} {c:+d}",
        f"{c}+e^{{{k}}}",
        f"\\exp({k}){c:+d}",
        f"{c}+\\frac{{1}}{{e^{{{-k}}}}}",
    ]


def _logarithm(b: int, n: int) -> list[str]:
    return [
        f"\\log_{{{b}}} {n}",
        f"\\log_{b} {n}" if b < 10 else f"\\log_{{{b}}}{n}",
        f"\\log_{{{b}}}({n})",
        f"\\frac{{\\ln {n}}}{{\\ln {b}}}",
        f"\\frac{{\\log {n}}}{{\\log {b}}}",
    ]


def _choose(n: int, k: int) -> list[str]:
    return [
        f"\\binom{{{n}}}{{{k}}}",
        f"\\dbinom{{{n}}}{{{k}}}",
        str(comb(n, k)),
        f"\\frac{{{n}!}}{{{k}!({n}-{k})!}}",
        f"{n}!/({k}! \\cdot {n - k}!)",
    ]


def _repeating(a: int) -> list[str]:
    value = Fraction(a, 99)
    return [
        f"0.\\overline{{{a:02d}}}",
        fraction_text(value.numerator, value.denominator),
        f"0.{a:02d}\\overline{{{a:02d}}}",
        f"0.\\overline{{{a:02d}{a:02d}}}",
    ]


def _interval(low: int, high: int, opening: str, closing: str) -> list[str]:
    less = ["<" if opening == "(" else "\\le", "<" if closing == ")" else "\\le"]
    found = [f"{opening}{low},{high}{closing}", f"\\left{opening}{low}, {high}\\right{closing}"]
    found += [f"x \\in {opening}{low}, {high}{closing}", f"{low} {less[0]} x {less[1]} {high}"]
    found += [f"{low} {less[0].replace('le', 'leq')} x {less[1].replace('le', 'leqslant')} {high}"]
    mirrored = [sign.replace("<", ">").replace("\\le", "\\ge") for sign in less]
    return [*found, f"{high} {mirrored[1]} x {mirrored[0]} {low}"]


def _outside(low: int, high: int, left: str, right: str) -> list[str]:
    less, more = ("<" if left == ")" else "\\le "), (">" if right == "(" else "\\ge ")
    a, b = f"(-\\infty,{low}{left}", f"{right}{high},\\infty)"
    return [
        f"{a}\\cup{b}",
        f"{b}\\cup{a}",
        f"{a} \\cup {b}",
        f"{a}\u222a{b}",
        f"x \\in {a} \\cup {b}",
        f"{a}\\cup{right}{high},+\\infty)",
        f"x{less}{low} \\text{{ or }} x{more}{high}",
        f"x{more}{high} or x{less}{low}",
    ]


FORMULAS = [
    Kind(
        name="interval",
        draw=lambda r: (*sorted(r.sample(range(-40, 60), 2)), r.choice("(["), r.choice(")]")),
        spell=_interval,
    ),
    Kind(
        name="union",
        draw=lambda r: (*sorted(r.sample(range(-40, 60), 2)), r.choice(")]"), r.choice("([")),
        spell=_outside,
    ),
    Kind(name="line", draw=lambda r: (integer(r, 2, 20), integer(r, 1, 30)), spell=_line),
    Kind(name="matrix", draw=lambda r: tuple(integer(r, 0, 20) for _ in range(4)), spell=_matrix),
    Kind(name="column", draw=lambda r: tuple(r.sample(range(-20, 20), 3)), spell=_column),
    Kind(
        name="inequality",
        draw=lambda r: (integer(r), r.choice((">", "<", "\\ge", "\\le"))),
        spell=_more_than,
    ),
    Kind(
        name="plus-minus",
        draw=lambda r: (integer(r, 1, 20), r.randint(1, 6), r.choice((2, 3, 5, 7, 19))),
        spell=_plus_minus,
    ),
    Kind(
        name="scientific",
        draw=lambda r: (r.randint(11, 99), r.choice((-8, -5, -3, 3, 6, 9))),
        spell=_scientific,
        means=lambda a, n: Fraction(a, 10) * Fraction(10) ** n,
    ),
    Kind(
        name="power",
        draw=lambda r: (r.randint(2, 9), r.randint(2, 30)),
        spell=_power,
        means=lambda b, n: Fraction(b) ** n,
    ),
    Kind(
        name="symbolic",
        draw=lambda r: (r.randint(2, 9), integer(r, 1, 9), r.choice("abnxt")),
        spell=_symbolic,
    ),
    Kind(
        name="trigonometric",
        draw=lambda r: (r.randint(2, 9), r.choice(("sin", "cos", "tan"))),
        spell=_trigonometric,
    ),
    Kind(
        name="exponential", draw=lambda r: (integer(r, 1, 9), integer(r, 1, 9)), spell=_exponential
    ),
    Kind(
        name="logarithm",
        draw=lambda r: (r.randint(2, 12), r.choice((15, 21, 35, 77))),
        spell=_logarithm,
    ),
    Kind(
        name="binomial",
        draw=lambda r: (r.randint(6, 20), r.randint(2, 5)),
        spell=_choose,
        means=comb,
    ),
    Kind(name="repeating decimal", draw=lambda r: (r.randint(1, 98),), spell=_repeating),
]
