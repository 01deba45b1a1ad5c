r"""Whether two mathematical answers are equal: read by ourselves, else by math-verify.

`formula/` reads whole answers and leaves nothing out.  math-verify is asked only about what that
does not know (sums, integrals, limits, products of matrices, ...): it drops words, signs and units
that it does not understand, so answers with words are never shown to it.
Only the worker processes import this: sympy takes a second, and some inputs take for ever.
"""

from __future__ import annotations

import re

from math_verify import parse, verify

from megatron_ext.rewards.formula.nodes import BrokenFormula, Node, UnknownFormula
from megatron_ext.rewards.formula.reading import read
from megatron_ext.rewards.formula.sameness import same
from megatron_ext.rewards.formula.spelling import spelled
from megatron_ext.rewards.formula.tokens import tokens

_COMMANDS = "sum prod int iint oint lim det max min gcd lcm partial nabla sup inf Re Im"
_FOR_MATH_VERIFY = frozenset(_COMMANDS.split(" "))


def are_equal(answer: str, *, gold: str) -> bool:
    """Whether `answer` means the same as `gold`, both LaTeX without dollar signs or a box.

    May take any time and memory, or exhaust the stack: call it where that can be ended.
    """
    try:
        given, expected = _read(answer), _read(gold)
    except BrokenFormula:
        return False
    if given is not None and expected is not None:
        if given.has("words") or expected.has("words"):
            return _plain(answer) == _plain(gold)
        verdict = same(given, expected)
        if verdict is not None:
            return verdict
        return _is_for_math_verify(answer, gold, needs_command=False) and _same(answer, gold)
    if _plain(answer) == _plain(gold):
        return True
    return _is_for_math_verify(answer, gold, needs_command=True) and _same(answer, gold)


def _read(text: str) -> Node | None:
    try:
        return read(text)
    except UnknownFormula:
        return None


def _plain(text: str) -> str:
    """The letters, numbers and separators of a text, for the comparison of words."""
    try:
        found = tokens(spelled(text))
    except UnknownFormula:
        return re.sub(r"\s+", "", text)
    parts = list[str]()
    for before, token in zip([None, *found], found, strict=False):
        if before is not None and before.kind == token.kind == "number":
            parts.append("|")
        parts.append("," if token.kind == "separator" else token.value)
    plain = re.sub(r"[\s(){}.]", "", "".join(parts))
    return plain if len(plain) == 1 else re.sub(",+", ",", plain).casefold()


def _is_for_math_verify(*texts: str, needs_command: bool) -> bool:
    commands = set[str]()
    for text in texts:
        try:
            found = tokens(spelled(text))
        except UnknownFormula:
            return False
        if any(token.kind in ("text", "base") for token in found):
            return False
        commands |= {token.value for token in found if token.kind == "command"}
    return not needs_command or any(
        c in _FOR_MATH_VERIFY or c.startswith("begin ") for c in commands
    )


def _same(answer: str, gold: str) -> bool:
    stated, expected = (
        # None is documented to mean "no time limit"; its annotation says int
        parse(rf"\boxed{{{spelled(text)}}}", parsing_timeout=None)  # pyright: ignore[reportArgumentType]
        for text in (answer, gold)
    )
    if not expected or not stated:
        return False
    return verify(expected, stated, allow_set_relation_comp=True, timeout_seconds=None)
