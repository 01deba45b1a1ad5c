r"""Where a response states its answer: the last \boxed{...}; else "#### x" or "the answer is x";
else all of it, if it is nothing but a number or a formula in dollar signs.

A box that is empty or never closed is no answer, and nothing before it counts instead: a policy is
paid for what it says last.  Boxes next to each other (`\boxed{2} and \boxed{3}`) are one answer.
Linear in the length of the response, apart from the anchors, which look at its end only.
"""

from __future__ import annotations

import re

MAX_ANSWER_LENGTH = 2000
"""Characters; a longer answer is no answer."""
MAX_BOXES = 100
"""Boxes next to each other; a longer list is no answer."""

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_BETWEEN_BOXES = re.compile(r"(?:[\s,;$]|\\[,;!() ]|\\text\s*\{\s*(?:and|or)\s*\}|and|or)*")
_ANCHOR = re.compile(
    r"####[ \t]*|\banswer[ \t]*(?:is|:|=|is[ \t]*:)[ \t:]*(?:\*\*[ \t]*)?", re.IGNORECASE
)
_ANCHOR_REACH = 4 * MAX_ANSWER_LENGTH
_MATHS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:/\d+)?\.?")
_SENTENCE_END = re.compile(r"\.(?:\s|$)|\n|\*\*|$")


def final_answer(response: str) -> str | None:
    """The answer a response states, stripped; None = it states none."""
    boxes = list(_BOX.finditer(response))
    if boxes:
        stated = _boxed(response, boxes)
    else:
        stated = _anchored(response[-_ANCHOR_REACH:]) or _bare(response)
    if stated is None or not stated.strip() or len(stated) > MAX_ANSWER_LENGTH:
        return None
    return stated.strip()


def unwrapped(answer: str) -> str:
    """A known answer without what surrounds it: dollar signs, a box, white space."""
    text = answer.strip()
    boxes = list(_BOX.finditer(text))
    if boxes and boxes[0].start() == 0 and (inner := _boxed(text, boxes)) is not None:
        return inner.strip()
    for opening, closing in _MATHS:
        inner = text[len(opening) : -len(closing)]
        if text.startswith(opening) and text.endswith(closing) and inner and opening not in inner:
            return inner.strip()
    return text


def _boxed(text: str, boxes: list[re.Match[str]]) -> str | None:
    """Content of the last box, joined with those right before it; None = not closed or empty."""
    contents: list[str] = []
    border = len(text)
    for box in reversed(boxes):
        end = _closing_brace(text, box.end(), border) if text[box.end() : box.end() + 1] else None
        if end is None or not text[box.end() + 1 : end].strip():
            break
        if contents and not _BETWEEN_BOXES.fullmatch(text, end + 1, border):
            break
        content = text[box.end() + 1 : end].strip()
        if len(contents) > MAX_BOXES:
            return None
        if content not in contents:
            contents.append(content)
        border = box.start()
    return ",".join(reversed(contents)) or None


def _closing_brace(text: str, start: int, limit: int) -> int | None:
    """Index of the brace that closes the one at `start`, below `limit`; None = there is none."""
    if text[start] != "{":
        return None
    depth, position = 0, start
    while position < limit:
        character = text[position]
        if character == "\\":
            position += 1  # an escaped brace is a character of the answer
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return position
        position += 1
    return None


def _bare(response: str) -> str | None:
    """The response itself, if it is only a number or a formula."""
    text = response[: MAX_ANSWER_LENGTH + 1].strip()
    inner = unwrapped(text)
    return inner if inner != text or _NUMBER.fullmatch(text) else None


def _anchored(text: str) -> str | None:
    """What follows the last "#### " or "answer is", to the end of the formula or sentence."""
    anchors = list(_ANCHOR.finditer(text))
    if not anchors:
        return None
    rest = text[anchors[-1].end() :]
    for opening, closing in _MATHS:
        if rest.startswith(opening):
            end = rest.find(closing, len(opening))
            return rest[len(opening) : end] if end >= 0 else None
    sentence_end = _SENTENCE_END.search(rest)
    return rest[: sentence_end.start()] if sentence_end else rest
