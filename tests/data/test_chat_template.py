"""Turns are marked to the character, whatever the template does with earlier ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.data.chat_template import MarkedText, Rendering, View, mark_turns
from megatron_ext.data.records import BadRecord, Chat, Message

LETTERS = {"user": "U", "assistant": "A", "tool": "T", "system": "S"}


def plain(messages: Sequence[Message], is_prompt: bool) -> Rendering:
    """`U:hello;` a message, no history is rewritten."""
    text = "".join(f"{LETTERS[m['role']]}:{m['content']};" for m in messages)
    return Rendering(text=text + "A:" * is_prompt)


def forgetful(messages: Sequence[Message], is_prompt: bool) -> Rendering:
    """As `plain`, but thoughts (before a '|') stay only after the last question."""
    asked = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    shown = [
        {**m, "content": m["content"].split("|")[-1]} if i < asked else m
        for i, m in enumerate(messages)
    ]
    return plain(shown, is_prompt)


def blocks(messages: Sequence[Message], is_prompt: bool) -> Rendering:
    """As `plain`, saying itself what was generated."""
    text, generated = "", []
    for message in messages:
        text += f"{LETTERS[message['role']]}:"
        start = len(text)
        text += f"{message['content']};"
        if message["role"] == "assistant":
            generated.append((start, len(text)))
    return Rendering(text=text, generated=tuple(generated))


def chat(words: str) -> Chat:
    """`U:hello A:hi` as messages."""
    roles = {letter: role for role, letter in LETTERS.items()}
    pairs = [word.split(":") for word in words.split()]
    return Chat(messages=[{"role": roles[letter], "content": text} for letter, text in pairs])


def mark(history: Chat, template, **options) -> list[MarkedText]:
    """The chat marked as a template of this file writes it."""

    def write(views: Sequence[View]) -> list[Rendering]:
        shown = [
            (
                history.messages[: v.count]
                if v.last is None
                else [*history.messages[: v.count - 1], v.last]
            )
            for v in views
        ]
        return [template(m, v.is_prompt) for m, v in zip(shown, views, strict=True)]

    return mark_turns(history, write, **options)


def brackets(marked: MarkedText) -> str:
    """The text with its turns in brackets."""
    out, done = "", 0
    for span in marked.spans:
        out += f"{marked.text[done : span.start]}[{marked.text[span.start : span.end]}]{span.turn}"
        done = span.end
    return out + marked.text[done:]


def test_turns_between_tools() -> None:
    [marked] = mark(chat("S:s U:u A:call T:t A:answer U:bye"), plain, has_blocks=False)
    assert brackets(marked) == "S:s;U:u;A:[call;]0T:t;A:[answer;]1"


def test_consecutive_turns_of_the_assistant() -> None:
    [marked] = mark(chat("U:u A:a A:b"), plain, has_blocks=False)
    assert brackets(marked) == "U:u;A:[a;]0A:[b;]1"


def test_a_first_turn_of_the_assistant() -> None:
    [marked] = mark(chat("A:a U:u A:b"), plain, has_blocks=False)
    assert brackets(marked) == "A:[a;]0U:u;A:[b;]1"


def test_rewritten_turns_are_trained_as_they_were_generated() -> None:
    history = chat("U:u A:x|a T:t A:y|b U:v A:z|c")
    found = [brackets(m) for m in mark(history, forgetful, has_blocks=False)]
    assert found == ["U:u;A:[x|a;]0T:t;A:[y|b;]1", "U:u;A:a;T:t;A:b;U:v;A:[z|c;]0"]


def test_blocks_of_the_template() -> None:
    [marked] = mark(chat("U:u A:a T:t A:b U:v"), blocks, has_blocks=True)
    assert brackets(marked) == "U:u;A:[a;]0T:t;A:[b;]1"


def test_a_turn_without_a_block() -> None:
    with pytest.raises(BadRecord, match=r"messages\[1\] is in no {% generation %} block"):
        mark(chat("U:u A:a"), plain, has_blocks=True)


def test_white_space_behind_the_end_token_is_not_trained() -> None:
    def lines(messages: Sequence[Message], is_prompt: bool) -> Rendering:
        return Rendering(text=plain(messages, is_prompt).text.replace(";", "<end>\n"))

    [marked] = mark(chat("U:u A:a U:v"), lines, has_blocks=False, end_tokens=["<end>"])
    assert brackets(marked) == "U:u<end>\nA:[a<end>]0"
    [marked] = mark(chat("U:u A:a U:v"), lines, has_blocks=False)
    assert brackets(marked) == "U:u<end>\nA:[a<end>\n]0"


def test_a_prompt_that_the_turn_does_not_continue() -> None:
    def prompts_to_think(messages: Sequence[Message], is_prompt: bool) -> Rendering:
        return Rendering(text=plain(messages, is_prompt).text + "<think>" * is_prompt)

    with pytest.raises(BadRecord, match=r"messages\[1\]: the chat template prompts with .*think"):
        mark(chat("U:u A:a"), prompts_to_think, has_blocks=False)


def test_a_tool_call_that_the_template_leaves_out() -> None:
    history = chat("U:u A:a")
    history.messages[1]["tool_calls"] = [{"function": {"name": "add"}}]
    with pytest.raises(BadRecord, match=r"leaves out the tool call add, .* Use --tool-call-format"):
        mark(history, plain, has_blocks=False)


@given(
    st.lists(
        st.tuples(st.sampled_from("UAT"), st.text("ab|:;", max_size=4)), min_size=1, max_size=9
    ).filter(lambda turns: any(letter == "A" for letter, _ in turns))
)
@pytest.mark.parametrize("template", [plain, forgetful, blocks])
def test_each_turn_once_after_its_own_prompt(template, turns: list[tuple[str, str]]) -> None:
    roles = {letter: role for role, letter in LETTERS.items()}
    history = Chat(messages=[{"role": roles[k], "content": text} for k, text in turns])
    marked = mark(history, template, has_blocks=template is blocks)
    found = [
        (text.text[: s.start], text.text[s.start : s.end]) for text in marked for s in text.spans
    ]
    expected = []
    for index in history.trained():
        prompt = template(history.messages[:index], True).text
        prompt += "A:" * (template is blocks)
        expected.append((prompt, history.messages[index]["content"] + ";"))
    assert found == expected
