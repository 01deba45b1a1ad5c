"""A Hugging Face tokenizer with its chat template.

Only local files are read: a folder with tokenizer.json, or a GGUF file, which holds one.
Text is tokenised whole, as transformers does.  Where a token would cross the border of a turn, the
text is tokenised in parts there: a model that generates the turn gets its prompt without a part of
the turn.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_ext.data.chat_template import MarkedText, Rendering, View, mark_turns
from megatron_ext.data.config import ToolCallFormat
from megatron_ext.data.records import BadRecord, Chat, Message
from megatron_ext.data.template_process import ChatTemplate
from megatron_ext.data.tokenizer import UNTRAINED, Passage
from megatron_ext.data.tokenizer_files import Unreadable, check_tokenizer_files, template_file
from megatron_ext.data.tool_calls import with_arguments, with_calls_as_text

UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ImportError,
    RecursionError,
)
"""What transformers raises for files that hold no tokenizer."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Keys that transformers takes for one another; templates read the first two."""


def load_tokenizer(model: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or a GGUF file; nothing is downloaded and no code in it is run.

    Raises:
        ValueError: there is no usable tokenizer.
    """
    path = Path(model)
    check_tokenizer_files(path)
    where = (path.parent, path.name) if path.suffix == ".gguf" else (path, None)
    try:
        with Unreadable(path):
            tokenizer = AutoTokenizer.from_pretrained(
                str(where[0]), gguf_file=where[1], local_files_only=True, trust_remote_code=False
            )
    except UNREADABLE as error:
        raise ValueError(f"--tokenizer-model {model} holds no tokenizer: {error}") from error
    if not tokenizer.is_fast:
        raise ValueError(
            f"--tokenizer-model {model} has no tokenizer.json: only fast tokenizers say which "
            "characters a token covers. Convert it with transformers, or use another."
        )
    return tokenizer


class HuggingFaceTokenizer:
    """A fast tokenizer; `chat_template` replaces its own.

    template_name: where chat_template was found, for messages.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None = None,
        template_name: str = "--chat-template",
        tool_call_format: ToolCallFormat = "template",
    ) -> None:
        self._tokenizer: Any = tokenizer  # transformers' own types are too wide to be checked
        self._chat_template = chat_template
        self._tool_call_format = tool_call_format
        added = tokenizer.added_tokens_decoder.values()
        self._special = [token.content for token in added if token.special]
        self._template_name = template_name
        self._templates: dict[str, ChatTemplate] = {}
        self._takes_objects: dict[str, bool] = {}

    @property
    def start_ids(self) -> list[int]:
        """What the tokenizer puts before a text, such as a begin-of-text token; often nothing.

        What some put behind it, such as an end-of-text token, would end a prompt: `end_id` goes
        where it belongs.
        """
        return list(self._put_before)

    @cached_property
    def _put_before(self) -> list[int]:
        probe = self._tokenizer("a", return_special_tokens_mask=True, verbose=False)
        is_added = [*probe.special_tokens_mask, 0]
        return probe.input_ids[: is_added.index(0)]

    @property
    def end_id(self) -> int:
        """The end-of-text token.  Raises ValueError when the tokenizer has none."""
        end = self._tokenizer.eos_token_id
        if end is None:
            raise ValueError(
                f"{self._name} has no end-of-text token (eos_token), which ends a text: set it in "
                "its tokenizer_config.json, or train on messages."
            )
        return end

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, nothing added."""
        return self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids

    def encode_parts(self, parts: Sequence[str]) -> list[list[int]]:
        """Tokens of each part of one text, as the whole text's where no token crosses a border."""
        borders = [0, *accumulate(map(len, parts))]
        text, cuts = "".join(parts), {0, borders[-1]}
        while True:
            ids, ends = self._encode_pieces(text, sorted(cuts))
            crossed = set(borders) - cuts - set(ends)
            if not crossed:
                break
            cuts |= crossed
        counts = [bisect_right(ends, border) for border in borders]
        return [ids[start:end] for start, end in pairwise(counts)]

    def encode_chat(self, chat: Chat) -> list[list[Passage]]:
        """The sequences of `mark_turns`, tokenised.

        Raises:
            ValueError: the tokenizer has no chat template.
        """
        template = self._template(chat.tools)
        messages = self._with_tool_calls(chat.messages, template)
        chat = Chat(messages=list(messages), tools=chat.tools)

        def write(views: Sequence[View]) -> list[Rendering]:
            return self._write(template, messages, views, tools=chat.tools)

        texts = mark_turns(
            chat,
            write,
            has_blocks=bool(_GENERATION.search(template.source)),
            end_tokens=self._special,
        )
        return [self._passages(text) for text in texts]

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a chat up to where the assistant's answer begins, as in training on it.

        Raises:
            BadRecord: the chat template does not take the messages.
            ValueError: the tokenizer has no chat template, or it cannot be used.
        """
        template = self._template(None)
        messages = self._with_tool_calls(messages, template)
        [prompt] = self._write(template, messages, [View(count=len(messages), is_prompt=True)])
        return self.encode(prompt.text)

    def _passages(self, marked: MarkedText) -> list[Passage]:
        parts, turns, done = [], [], 0
        for span in marked.spans:
            parts += [marked.text[done : span.start], marked.text[span.start : span.end]]
            turns += [UNTRAINED, span.turn]
            done = span.end
        encoded = self.encode_parts(parts)
        return [Passage(ids=ids, turn=turn) for ids, turn in zip(encoded, turns, strict=True)]

    def _encode_pieces(self, text: str, cuts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Tokens of the text cut at `cuts`, and the end of each in the text, never decreasing.

        Only ends are used: some tokenizers leave white space out of a token's start.
        """
        ids: list[int] = []
        ends: list[int] = []
        for start, end in pairwise(cuts):
            encoded = self._tokenizer(
                text[start:end],
                add_special_tokens=False,
                return_offsets_mapping=True,
                verbose=False,
            )
            ids += encoded.input_ids
            ends += accumulate((start + e for _, e in encoded.offset_mapping), max)
        return ids, ends

    def _template(self, tools: list[dict[str, Any]] | None) -> ChatTemplate:
        try:
            source = self._tokenizer.get_chat_template(self._chat_template, tools=tools)
        except ValueError as error:
            raise ValueError(
                f"{self._name} has no chat template, so messages cannot be written: give one as "
                "--chat-template, or use the tokenizer of a chat model."
            ) from error
        if source not in self._templates:
            is_own = self._chat_template is None
            name = template_file(self._tokenizer.name_or_path) if is_own else self._template_name
            self._templates[source] = ChatTemplate(source, name=name)
        return self._templates[source]

    def _with_tool_calls(
        self, messages: Sequence[Message], template: ChatTemplate
    ) -> Sequence[Message]:
        if not any(message.get("tool_calls") for message in messages):
            return messages
        if self._tool_call_format == "text":
            return with_calls_as_text(messages)
        if template.source not in self._takes_objects:
            self._takes_objects[template.source] = self._probe_arguments(template)
        return with_arguments(messages, as_objects=self._takes_objects[template.source])

    def _probe_arguments(self, template: ChatTemplate) -> bool:
        """Whether the template wants a call's arguments as an object; else as JSON text."""
        call = {"name": "f", "arguments": '{"probe": "value"}'}
        call = {"id": "probe0000", "type": "function", "function": call}
        messages: list[Message] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        written = {}
        for as_objects in (True, False):
            converted = with_arguments(messages, as_objects=as_objects)
            try:
                written[as_objects] = self._write(template, converted, [View(count=2)])[0].text
            except BadRecord:
                written[as_objects] = ""
        return '"probe"' in written[True] or '"probe"' not in written[False]

    def _write(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        views: Sequence[View],
        *,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[Rendering]:
        """As transformers' apply_chat_template; a missing content (of a tool call) is empty."""
        views = [
            view if view.last is None else replace(view, last=_present(view.last)) for view in views
        ]
        variables = {"tools": tools, "documents": None, **self._tokenizer.special_tokens_map}
        return template.write(list(map(_present, messages)), views, variables=variables)

    @property
    def _name(self) -> str:
        return f"--tokenizer-model {self._tokenizer.name_or_path}"


def _present(message: Message) -> Message:
    """The message as templates get it: without nulls, its thoughts under each name."""
    present = {"content": ""} | {key: v for key, v in message.items() if v is not None}
    thoughts = next((present[key] for key in _THOUGHTS if key in present), None)
    if thoughts is None:
        return present
    return {"thinking": thoughts} | present | {"reasoning_content": thoughts}
