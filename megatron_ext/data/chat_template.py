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

from megatron_ext.data.left_out import calls_left_out, texts_left_out, with_marked_calls
from megatron_ext.data.records import BadRecord, Chat, Message


@dataclass(frozen=True, kw_only=True)
class View:
    """The beginning of a chat, to be written."""

    count: int
    """Messages, from the first."""
    is_prompt: bool = False
    """Whether the prompt for the next assistant turn follows."""
    last: Message | None = None
    """What is written instead of the last of these messages; None = the message itself."""


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


Write = Callable[[Sequence[View]], Sequence[Rendering]]
"""How each of several views of a chat is written; raises BadRecord where the template refuses."""


def mark_turns(
    chat: Chat, write: Write, *, has_blocks: bool, end_tokens: Sequence[str] = ()
) -> list[MarkedText]:
    """The chat as marked texts; one, unless the template rewrites earlier turns.

    has_blocks: the template has {% generation %} blocks.
    end_tokens: special tokens.  What follows one of them at the end of a turn is white space of the
    template, not generated, and not trained.

    Raises:
        BadRecord: the template does not continue the prompt, or leaves out a turn or a part of it.
    """
    trained = chat.trained()
    views = [view for index in trained for view in _views(chat, index, has_blocks=has_blocks)]
    written = iter(write(views))
    texts: list[MarkedText] = []
    for index in trained:
        before = Rendering(text="") if has_blocks and index == 0 else next(written)
        after = next(written)
        marked = next(written) if chat.messages[index].get("tool_calls") else after
        find = _marked_by_template if has_blocks else _after_prompt
        pieces = find(before, after, index=index)
        if not has_blocks:
            pieces = [_without_trailing_space(after.text, piece, end_tokens) for piece in pieces]
        _check_whole(chat.messages[index], before, after, marked=marked, name=f"messages[{index}]")
        text = after.text
        continues = bool(texts) and text.startswith(texts[-1].text)
        earlier = texts.pop().spans if continues else ()
        turn = earlier[-1].turn + 1 if earlier else 0
        spans = tuple(Span(start=start, end=end, turn=turn) for start, end in pieces)
        texts.append(MarkedText(text=text[: spans[-1].end], spans=earlier + spans))
    return texts


def _views(chat: Chat, index: int, *, has_blocks: bool) -> list[View]:
    """What stands before message `index`, with it, and with other tool calls if it has some."""
    message = chat.messages[index]
    before = [View(count=index, is_prompt=not has_blocks)]
    views = [*(before if index or not has_blocks else ()), View(count=index + 1)]
    if message.get("tool_calls"):
        views.append(View(count=index + 1, last=with_marked_calls(message)))
    return views


def _after_prompt(before: Rendering, after: Rendering, *, index: int) -> list[tuple[int, int]]:
    """All that follows the prompt was generated."""
    prompt, text = before.text, after.text
    if not text.startswith(prompt):
        pairs = enumerate(zip(prompt, text, strict=False))
        start = max(next((i for i, (a, b) in pairs if a != b), len(text)) - 20, 0)
        raise BadRecord(
            f"messages[{index}]: the chat template prompts with {prompt[start : start + 60]!r} but "
            f"writes the turn as {text[start : start + 60]!r}, so that what was generated is not "
            "known. Give a --chat-template with {% generation %} blocks"
        )
    return [(len(prompt), len(text))]


def _marked_by_template(
    before: Rendering, after: Rendering, *, index: int
) -> list[tuple[int, int]]:
    """The blocks that the messages before do not have."""
    pieces = [piece for piece in after.generated[len(before.generated) :] if piece[0] < piece[1]]
    if not pieces:
        raise BadRecord(f"messages[{index}] is in no {{% generation %}} block of the chat template")
    return pieces


def _without_trailing_space(
    text: str, piece: tuple[int, int], end_tokens: Sequence[str]
) -> tuple[int, int]:
    start, end = piece
    generated = text[start:end].rstrip()
    if generated.endswith(tuple(token for token in end_tokens if token)):
        return start, start + len(generated)
    return piece


def _check_whole(
    message: Message, before: Rendering, after: Rendering, *, marked: Rendering, name: str
) -> None:
    """Refuse a template that passes over a part of a turn: it would be trained without it."""
    start = len(before.text) if after.text.startswith(before.text) else 0
    turn = after.text[start:]
    missing = texts_left_out(message, prompt=after.text[:start], turn=turn)
    if missing:
        raise BadRecord(
            f"{name}: the chat template leaves out {' and '.join(missing)}, or a part of it. Use "
            "a --chat-template that writes it, or leave it out of the messages"
        )
    start = len(before.text) if marked.text.startswith(before.text) else 0
    calls = calls_left_out(message, turn=turn, marked_turn=marked.text[start:])
    if calls:
        raise BadRecord(
            f"{name}: the chat template leaves out the tool call {calls[0]}, or a part of it. Use "
            "--tool-call-format text, or a --chat-template that writes tool calls"
        )
