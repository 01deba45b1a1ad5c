r"""Units by their many names: `5 cm` is `5\text{ centimeters}`, not `5\text{ inches}`."""

from __future__ import annotations

import re

_NAMES = """
mm millimeter millimetre
cm centimeter centimetre
m meter metre
km kilometer kilometre
in inch inches
ft foot feet
yd yard
mi mile
mg milligram
g gram gm
kg kilogram
lb lbs pound
oz ounce
ml milliliter millilitre
l liter litre
gal gallon
s sec second
min minute
h hr hour
day
week
month
year yr
dollar usd
cent
percent pct percentage
degree deg
radian rad
unit
newton n
joule j
watt w
hz hertz
mph
kmh kph
am a.m
pm p.m
"""
_CANONICAL = {
    name: line.split()[0] for line in _NAMES.strip().splitlines() for name in line.split()
}
_POWERS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cu": "3", "cubed": "3"}
_PHRASES = (("miles per hour", "mph"), ("kilometers per hour", "kmh"), ("km / h", "kmh"))
_PART = re.compile(r"[a-z]+(?:\.[a-z])*|\d+|[/^*°$€£%-]|\S")


def is_unit(word: str) -> bool:
    """Whether a word of two or more letters is the name of a unit."""
    return len(word) > 1 and (_singular(word.lower()) in _CANONICAL or word.lower() in _CANONICAL)


def canonical_unit(text: str) -> str:
    """One name for a unit: `square centimeters`, `cm^{2}` and `cm^2` are `cm^2`."""
    words = text.lower().replace("{", "").replace("}", "")
    for phrase, name in _PHRASES:
        words = words.replace(phrase, name)
    parts: list[str] = []
    power = ""
    for part in _PART.findall(words):
        if part in ("square", "sq", "cubic", "cu"):
            power = _POWERS[part]
        elif part in _POWERS:
            parts.append(f"^{_POWERS[part]}")
        elif part[0].isalpha():
            parts.append(_canonical(part) + (f"^{power}" if power else ""))
            power = ""
        elif part not in (".", "*"):
            parts.append("/" if part == "per" else part)
    named = ["/" if part == "per" else part for part in parts]
    return " ".join(named).replace(" ^ ", "^").replace(" ^", "^").replace("^ ", "^")


def _canonical(word: str) -> str:
    for form in (word, _singular(word)):
        if form in _CANONICAL:
            return _CANONICAL[form]
    return _singular(word)


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
