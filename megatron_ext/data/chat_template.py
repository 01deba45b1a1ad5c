"""Which characters of a rendered chat the assistant generated, for any chat template.

A turn is what the model would generate: it begins where the rendered prompt of the messages before
it ends, and ends with the end-of-turn token.  A template with {% generation %} blocks says so
itself; then its blocks are the turns.
Templates may rewrite earlier turns once later messages come (Qwen3 removes their thinking), and no
single text then holds every turn as it was generated.  A chat becomes as few texts as show every
turn after the very prompt it was generated from; each turn is trained in one of them.
Invariant the tests check: each trained turn once, after its own prompt, marked to the character.
Not covered: templates that read the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jinja2 import TemplateError

from megatron_ext.data.records import BadRecord, Chat, Message, call_of

TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What a template raises for a chat it does not expect."""


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """A chat as its template writes it."""

    text: str
    generated: tuple[tuple[int, int], ...] = ()
    """Start and end of what stood in {% generation %} blocks."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Characters start to end - 1 belong to an assistant turn (0, 1, ... in its text)."""

    start: int
    end: int
    turn: int


@dataclass(frozen=True, kw_only=True)
class MarkedText:
    """A rendered chat up to the end of its last trained turn."""

    text: str
    spans: tuple[Span, ...]


Render = Callable[[Sequence[Message], bool], Rendering]
"""(messages, whether the prompt for the next assistant turn follows) -> how they are written."""


def mark_turns(
    chat: Chat, render: Render, *, has_blocks: bool, end_tokens: Sequence[str] = ()
) -> list[MarkedText]:
    """The chat as marked texts; one, unless the template rewrites earlier turns.

    has_blocks: the template has {% generation %} blocks.
    end_tokens: special tokens.  What follows one of them at the end of a turn is white space of the
    template, not generated, and not trained.

    Raises:
        BadRecord: the template does not continue the prompt, or leaves a turn or its calls out.
    """
    find = _marked_by_template if has_blocks else _after_prompt
    texts: list[MarkedText] = []
    for index in chat.trained():
        text, pieces = find(chat, index, render=render)
        if not has_blocks:
            pieces = [_without_trailing_space(text, piece, end_tokens) for piece in pieces]
        _check_calls("".join(text[start:end] for start, end in pieces), chat, index)
        continues = bool(texts) and text.startswith(texts[-1].text)
        before = texts.pop().spans if continues else ()
        turn = before[-1].turn + 1 if before else 0
        spans = tuple(Span(start=start, end=end, turn=turn) for start, end in pieces)
        texts.append(MarkedText(text=text[: spans[-1].end], spans=before + spans))
    return texts


def _after_prompt(chat: Chat, index: int, *, render: Render) -> tuple[str, list[tuple[int, int]]]:
    """The text up to message `index`, of which all that follows its prompt was generated."""
    prompt = render(chat.messages[:index], True).text
    text = render(chat.messages[: index + 1], False).text
    if not text.startswith(prompt):
        pairs = enumerate(zip(prompt, text, strict=False))
        start = max(next((i for i, (a, b) in pairs if a != b), len(text)) - 20, 0)
        raise BadRecord(
            f"messages[{index}]: the chat template prompts with {prompt[start : start + 60]!r} but "
            f"writes the turn as {text[start : start + 60]!r}, so that what was generated is not "
            "known. Give a --chat-template with {% generation %} blocks"
        )
    return text, [(len(prompt), len(text))]


def _marked_by_template(
    chat: Chat, index: int, *, render: Render
) -> tuple[str, list[tuple[int, int]]]:
    """The text up to message `index`, and its blocks that the messages before it do not have."""
    before = render(chat.messages[:index], False).generated if index else ()
    rendering = render(chat.messages[: index + 1], False)
    pieces = [piece for piece in rendering.generated[len(before) :] if piece[0] < piece[1]]
    if not pieces:
        raise BadRecord(f"messages[{index}] is in no {{% generation %}} block of the chat template")
    return rendering.text, pieces


def _without_trailing_space(
    text: str, piece: tuple[int, int], end_tokens: Sequence[str]
) -> tuple[int, int]:
    start, end = piece
    generated = text[start:end].rstrip()
    if generated.endswith(tuple(token for token in end_tokens if token)):
        return start, start + len(generated)
    return piece


def _check_calls(generated: str, chat: Chat, index: int) -> None:
    """Refuse a template that passes over tool calls: the turn would be trained without them."""
    calls = chat.messages[index].get("tool_calls") or ()
    missing = [name for call in calls if (name := call_of(call)["name"]) not in generated]
    if missing:
        raise BadRecord(
            f"messages[{index}]: the chat template leaves out the tool call {missing[0]}. Use "
            "--tool-call-format text, or a --chat-template that writes tool calls"
        )
