r"""Where a response states its answer: the last \boxed{...}; else "#### x", "the answer is x",
"Final Answer: x"; else all of it, if it is a number, or a short text with one formula.

A box that is empty or never closed is no answer, and nothing before it counts instead: a policy is
paid for what it says last.  So it is with "the answer is not x".  Boxes next to each other
(`\boxed{2} and \boxed{3}`) are one answer, and so are `$3$ or $4$`.  Linear in the length.
"""

from __future__ import annotations

import re
from collections import deque

from megatron_ext.rewards.boxes import BOX, boxed
from megatron_ext.rewards.formula.units import is_unit

MAX_ANSWER_LENGTH = 2000
"""Characters; a longer answer is no answer."""

_STRESS = r"[ \t*_]*"
_ANCHOR = re.compile(
    rf"####[ \t]*|\banswer{_STRESS}(?:is\b|:|=|equals\b|must be\b|should be\b){_STRESS}:?{_STRESS}",
    re.IGNORECASE,
)
_NEGATION = re.compile(r"\s*(?:definitely |certainly |therefore )?(?:not|never|no longer)\b|n't\b")
_MATHS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_FORMULA = re.compile(
    r"\$\$[^$]+\$\$|(?<!\\)\$(?:[^$\n\\]|\\.)+\$"
    r"|\\\((?:[^\\\n]|\\[^)])*\\\)|\\\[(?:[^\\]|\\[^\]])*\\\]"
)
_NUMBER = re.compile(r"[-+\u2212]?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?\.?")
_SENTENCE_END = re.compile(r"\.(?=\s|\*|$)|\n")
_LAST_VERB = re.compile(r".*\b(?:is|are|equals|be)\b[ \t:]*", re.IGNORECASE | re.DOTALL)
_ASIDE = re.compile(
    r"(?:[,;:]\s+|\s+\(|\s+(?=because|since|which|where|as\b|when))"
    r"(?!(?:and|or)\b|\W*\d|[\x00$\\])"
)
_HIDDEN = "\x00"
"""Stands for a formula while a sentence is looked at."""
_VALUE = re.compile(r"[\d\x00]")
_LIST_OF_FORMULAS = re.compile(r"(?:[\s,;.]|\band\b|\bor\b)*")
_DENIAL = re.compile(r"\b(?:not|never|no|cannot|except|unless|wrong|incorrect|if)\b|n't", re.I)
_LONGEST_BARE_TEXT = 300
_LONGEST_BARE_FORMULA = 100
_BOX = r"\boxed"
_COMMAND = re.compile(r"\\[a-zA-Z]+")


def final_answer(response: str, *, formulas: bool = True) -> str | None:
    """The answer a response states, stripped; None = it states none.

    formulas: whether a response that is nothing but a formula states it; a number always does.
    """
    boxes = list(BOX.finditer(response))
    stated = boxed(response, boxes) if boxes else _anchored(response)
    if stated is None and not boxes and _last_anchor(response) is None:
        stated = _bare(response, formulas=formulas)
    if stated is None or not stated.strip() or len(stated) > MAX_ANSWER_LENGTH:
        return None
    return stated.strip()


def unretracted(response: str) -> str:
    """What follows the last "the answer is not x"; the whole response, if there is none."""
    last = _last_anchor(response)
    if last is None or not _NEGATION.match(response, last.end()):
        return response
    end = _SENTENCE_END.search(response, last.end())
    return response[end.end() :] if end else ""


def unwrapped(answer: str) -> str:
    """A known answer without what surrounds it: dollar signs, a box, white space."""
    text = answer.strip()
    boxes = list(BOX.finditer(text))
    if boxes and boxes[0].start() == 0 and (inner := boxed(text, boxes)) is not None:
        return inner.strip()
    for opening, closing in _MATHS:
        inner = text[len(opening) : -len(closing)]
        if text.startswith(opening) and text.endswith(closing) and inner and opening not in inner:
            return inner.strip()
    return text


def _last_anchor(text: str) -> re.Match[str] | None:
    return next(iter(deque(_ANCHOR.finditer(text), maxlen=1)), None)


def _anchored(text: str) -> str | None:
    """What the sentence with the last "#### " or "answer is" states."""
    anchor = _last_anchor(text)
    if anchor is None or _NEGATION.match(text, anchor.end()):
        return None
    rest = text[anchor.end() :].lstrip()[: 2 * MAX_ANSWER_LENGTH]
    sentence = _sentence(rest)[:MAX_ANSWER_LENGTH].replace("**", " ").strip()
    formulas = iter([unwrapped(formula) for formula in _FORMULA.findall(sentence)])
    hidden = _FORMULA.sub(_HIDDEN, sentence.replace(_HIDDEN, ""))
    aside = next((a for a in _ASIDE.finditer(hidden) if _VALUE.search(hidden[: a.start()])), None)
    stated = hidden[: aside.start()] if aside else hidden
    if not anchor.group().startswith("#") and (verb := _LAST_VERB.match(stated)):
        stated = stated[verb.end() :]
        for _ in range(verb.group().count(_HIDDEN)):
            next(formulas)
    if _NEGATION.match(stated):
        return None
    shown = "".join(next(formulas) if part == _HIDDEN else part for part in stated)
    return shown.strip().rstrip(".").strip()


def _sentence(text: str) -> str:
    """The text up to the first end of a sentence that is in no formula."""
    position = 0
    while end := _SENTENCE_END.search(text, position):
        formula = _FORMULA.search(text, position)
        if formula is None or formula.start() >= end.start():
            return text[: end.start()]
        position = formula.end()
    return text


def _bare(response: str, *, formulas: bool) -> str | None:
    """The response itself, if it is only a number, formulas, or a short text with one formula."""
    text = response[: MAX_ANSWER_LENGTH + 1].strip()
    if _NUMBER.fullmatch(text):
        return text
    inner = unwrapped(text)
    if inner != text:
        return inner
    if not formulas:
        return None
    if len(text) <= _LONGEST_BARE_FORMULA and _is_formula(text):
        return text
    found = _FORMULA.findall(text)
    around = _FORMULA.sub(" ", text)
    if found and _LIST_OF_FORMULAS.fullmatch(around):
        return _FORMULA.sub(lambda match: unwrapped(match.group()), text).rstrip(".")
    is_short = len(text) <= _LONGEST_BARE_TEXT and not re.search(r"[\d$\\]", around)
    if len(found) == 1 and is_short and not _DENIAL.search(around):
        return unwrapped(found[0])
    return None


def _is_formula(text: str) -> bool:
    """Whether a text has no words but units, and something that has a value."""
    plain = _COMMAND.sub(" ", text)
    words = re.findall(r"[a-zA-Z]{2,}", plain)
    if _BOX in text:
        return False
    is_one_line = "\n" not in text and not _SENTENCE_END.search(text)
    return is_one_line and all(map(is_unit, words)) and bool(re.search(r"\d|\\[a-zA-Z]", text))
