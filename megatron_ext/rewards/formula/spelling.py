r"""One spelling for what is written in many: Unicode to LaTeX, thousands, repeating decimals.

    ½ ² √5 45° U+2212     ->  \frac{1}{2} ^{2} \sqrt{5} 45^\circ -
    70\,000  70{,}000     ->  70000         (1,234 depends on its brackets: tokens.py)
    0.1\overline{6}       ->  {\frac{15}{90}}
    1.5e3                 ->  1.5\times 10^{3}

Nothing here changes what an answer means.
"""

from __future__ import annotations

import re

_CHARACTER_TABLE = r"""
2212 - | 2013 - | 2014 - | 2010 - | 2011 - | fe63 - | ff0d - | 00d7 \times | 2715 \times
22c5 \cdot | 00b7 \cdot | 2219 \cdot | 2022 \cdot | 00f7 \div | 2215 / | 2044 / | 00b1 \pm
2213 \mp | 00b0 ^\circ | 00ba ^\circ | 221e \infty | 2264 \le | 2a7d \le | 2265 \ge | 2a7e \ge
2260 \ne | 2248 \approx | 222a \cup | 2229 \cap | 2205 \emptyset | 2208 \in | 2216 \setminus
211d \mathbb{R} | 2261 \equiv | 2228 \vee | 00ac \neg | 03c0 \pi | 03b8 \theta | 03b1 \alpha
03b2 \beta | 03b3 \gamma | 03bb \lambda | 03c6 \phi | 03c9 \omega | 03bc \mu | 03b5 \epsilon
03c1 \rho | 03c3 \sigma | 27e8 \langle | 27e9 \rangle | 2032 ' | 2019 ' | ff05 \% | ff08 (
ff09 ) | ff0c , | 00a0 ~ | 2009 \, | 202f \, | 2007 \, | 200a \, | 200b | 2060 | feff
20ac \euro | 00a3 \pounds | 00a2 \text{ cents}
"""
_FRACTION_TABLE = """
00bd 1 2 | 2153 1 3 | 2154 2 3 | 00bc 1 4 | 00be 3 4 | 2155 1 5 | 2156 2 5 | 2157 3 5 | 2158 4 5
2159 1 6 | 215a 5 6 | 215b 1 8 | 215c 3 8 | 215d 5 8 | 215e 7 8 | 2150 1 7 | 2151 1 9
2152 1 10
"""
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ⁽⁾", "0123456789+-ni()")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋ₙ", "0123456789+-n")
_CHARACTERS = {
    chr(int(row.split()[0], 16)): row.strip()[4:].lstrip() + " " * ("\\" in row)
    for row in _CHARACTER_TABLE.replace("|\n", "|").replace("\n", " | ").split(" | ")
    if row.strip()
}
_FRACTIONS = {
    chr(int(code, 16)): (top, bottom)
    for code, top, bottom in (
        row.split() for row in _FRACTION_TABLE.strip().replace("\n", " | ").split(" | ")
    )
}
_RAISED = re.compile(f"[{''.join(map(chr, _SUPERSCRIPTS))}]+")
_LOWERED = re.compile(f"[{''.join(map(chr, _SUBSCRIPTS))}]+")
_ROOT = re.compile(r"([√∛∜])\s*(\d+(?:\.\d+)?|[a-zA-Z])?")
_ROOT_DEGREE = {"√": "", "∛": "[3]", "∜": "[4]"}
_GAP = r"(?:\s?\{\s?,\s?\}(?:\\[,!])?\s?|,\s?\\!\s?|\\[,;:! ]\s?|~| )"
_THOUSANDS = re.compile(rf"(?<![\d.,])\d{{1,3}}(?:{_GAP}\d{{3}})+(?![\d/])")
_ENDS_IN_GAP = re.compile(r"\\[,;:!] ?|[{},~ ]|\\ ")
_EXPONENT = re.compile(r"(?<![\w.\\])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?!\w|\s*\)?\s*_)")
_REPEATING = re.compile(
    r"(?<![\w.])(\d{1,20})?\.(\d{0,20})\\(?:overline|bar)\s*(?:\{(\d{1,20})\}|(\d))"
)
_HALF_DAY = re.compile(r"(\d)\s*(?:\\text\s*\{\s*)?([ap])\.?\s?m\.?\}?$")
_EDGES = " \t\r\n*"
_ESCAPED_TWICE = re.compile(r"\\\\(?=[a-zA-Z]{2})")
_DOLLARS = re.compile(r"(?<!\\)\$")


def spelled(text: str) -> str:
    """The same answer in the one spelling that `tokens.py` reads."""
    if r"\begin" not in text:
        text = _ESCAPED_TWICE.sub(r"\\", text)
    text = _ROOT.sub(_root, text)
    text = _RAISED.sub(lambda m: f"^{{{m.group().translate(_SUPERSCRIPTS)}}}", text)
    text = _LOWERED.sub(lambda m: f"_{{{m.group().translate(_SUBSCRIPTS)}}}", text)
    for character, (top, bottom) in _FRACTIONS.items():
        text = text.replace(character, rf"\frac{{{top}}}{{{bottom}}}")
    text = "".join(_CHARACTERS.get(character, character) for character in text)
    text = _DOLLARS.sub(" ", text.replace(r"\$", r"\dollar "))
    for opening in (r"\(", r"\)", r"\[", r"\]"):
        text = text.replace(opening, " ")
    text = text.replace("**", " ").replace("...", r"\ldots ").strip(_EDGES).rstrip(_EDGES + ".")
    text = _THOUSANDS.sub(lambda m: _ENDS_IN_GAP.sub("", m.group()), text)
    text = _EXPONENT.sub(r"\1\\times 10^{\2}", text)
    text = _HALF_DAY.sub(r"\1\\text{ \2m}", text)
    return _REPEATING.sub(_as_fraction, text).strip()


def _root(match: re.Match[str]) -> str:
    inside = f"{{{match[2]}}}" if match[2] else ""
    return rf"\sqrt{_ROOT_DEGREE[match[1]]}{inside}"


def _as_fraction(match: re.Match[str]) -> str:
    whole, fixed, repeating = match[1] or "0", match[2], match[3] or match[4]
    numerator = int(whole + fixed + repeating) - int(whole + fixed)
    denominator = (10 ** len(repeating) - 1) * 10 ** len(fixed)
    return rf"{{\frac{{{numerator}}}{{{denominator}}}}}"
