r"""What is in the last \boxed{...} of a text, with the boxes right before it."""

from __future__ import annotations

import re

MAX_BOXES = 100
"""Boxes next to each other; a longer list is no answer."""

BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")

_BETWEEN = re.compile(
    r"(?:[\s,;$]|\\[,;!()\[\] ]|\\q?quad|\\text\s*\{\s*,?\s*(?:and|or)?\s*\}|and|or)*"
)
_LONGEST_BETWEEN = 40
_JOINED = re.compile(r"\b(?:and|or)\b")
_PARTED = re.compile(r"[.:!?;\n]|\b(?:then|no|not|but|wait|so|instead|rather|actually|hence)\b")


def boxed(text: str, boxes: list[re.Match[str]]) -> str | None:
    """Content of the last box, joined with those right before it; None = not closed or empty."""
    stated = ""
    contents = list[str]()
    border = len(text)
    for box in reversed(boxes):
        end = _closing_brace(text, box.end(), border) if text[box.end() : box.end() + 1] else None
        if end is None or not text[box.end() + 1 : end].strip():
            break
        if contents and not _are_joined(text, end + 1, border):
            break
        content = text[box.end() + 1 : end].strip()
        if len(contents) > MAX_BOXES:
            return None
        if content not in contents:
            is_or = contents and re.search(r"\bor\b", text[end + 1 : border])
            stated = content + ((" or " if is_or else ", ") + stated if contents else "")
            contents.append(content)
        border = box.start()
    return stated or None


def _are_joined(text: str, start: int, end: int) -> bool:
    if _BETWEEN.fullmatch(text, start, end):
        return True
    between = text[start:end] if end - start <= _LONGEST_BETWEEN else ""
    return bool(_JOINED.search(between)) and not _PARTED.search(between)


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
