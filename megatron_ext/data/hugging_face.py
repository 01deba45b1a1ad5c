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
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from megatron_ext.data.chat_template import TEMPLATE_ERRORS, MarkedText, Rendering, mark_turns
from megatron_ext.data.config import ToolCallFormat
from megatron_ext.data.records import BadRecord, Chat, Message
from megatron_ext.data.tokenizer import UNTRAINED, Passage
from megatron_ext.data.tool_calls import with_arguments, with_calls_as_text

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def load_tokenizer(model: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or a GGUF file; nothing is downloaded.

    Raises:
        ValueError: there is no usable tokenizer.
    """
    path = Path(model)
    where = (path.parent, path.name) if path.suffix == ".gguf" else (path, None)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(where[0]), gguf_file=where[1], local_files_only=True
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--tokenizer-model {model} holds no tokenizer: {error}") from error
    if not tokenizer.is_fast:
        raise ValueError(
            f"--tokenizer-model {model} has no tokenizer.json: only fast tokenizers say which "
            "characters a token covers. Convert it with transformers, or use another."
        )
    return tokenizer


class HuggingFaceTokenizer:
    """A fast tokenizer; `chat_template` replaces its own."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None = None,
        tool_call_format: ToolCallFormat = "template",
    ) -> None:
        self._tokenizer: Any = tokenizer  # transformers' own types are too wide to be checked
        self._chat_template = chat_template
        self._tool_call_format = tool_call_format
        added = tokenizer.added_tokens_decoder.values()
        self._special = [token.content for token in added if token.special]
        self._takes_objects: dict[str, bool] = {}

    @property
    def start_ids(self) -> list[int]:
        """The begin-of-text token, where the tokenizer adds one to a text."""
        added = self._tokenizer("").input_ids
        return [id for id in added if id == self._tokenizer.bos_token_id]

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
        template = self._template(chat)
        messages = self._with_tool_calls(chat, template)
        chat = Chat(messages=messages, tools=chat.tools)

        def render(messages: Sequence[Message], is_prompt: bool) -> Rendering:
            return self._render(template, messages, tools=chat.tools, is_prompt=is_prompt)

        texts = mark_turns(
            chat,
            render,
            has_blocks=bool(_GENERATION.search(template)),
            end_tokens=self._special,
        )
        return [self._passages(text) for text in texts]

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

    def _template(self, chat: Chat) -> str:
        try:
            return self._tokenizer.get_chat_template(self._chat_template, tools=chat.tools)
        except ValueError as error:
            raise ValueError(
                f"{self._name} has no chat template, so messages cannot be written: give one as "
                "--chat-template, or use the tokenizer of a chat model."
            ) from error

    def _with_tool_calls(self, chat: Chat, template: str) -> list[Message]:
        if not any(message.get("tool_calls") for message in chat.messages):
            return chat.messages
        if self._tool_call_format == "text":
            return with_calls_as_text(chat.messages)
        if template not in self._takes_objects:
            self._takes_objects[template] = self._probe_arguments(template)
        return with_arguments(chat.messages, as_objects=self._takes_objects[template])

    def _probe_arguments(self, template: str) -> bool:
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
                written[as_objects] = self._render(template, converted).text
            except BadRecord:
                written[as_objects] = ""
        return '"probe"' in written[True] or '"probe"' not in written[False]

    def _render(
        self,
        template: str,
        messages: Sequence[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        is_prompt: bool = False,
    ) -> Rendering:
        """As transformers' apply_chat_template; a missing content (of a tool call) is empty."""
        present = [
            {"content": ""} | {key: value for key, value in message.items() if value is not None}
            for message in messages
        ]
        options: dict[str, Any] = {
            "tools": tools,
            "chat_template": template,
            "return_assistant_tokens_mask": bool(_GENERATION.search(template)),
            "add_generation_prompt": is_prompt,
            **self._tokenizer.special_tokens_map,
        }
        try:
            texts, generated = render_jinja_template([present], **options)
        except TEMPLATE_ERRORS as error:
            raise BadRecord(f"the chat template refuses it ({error})") from error
        spans: Any = generated[0] if generated else ()
        return Rendering(text=texts[0], generated=tuple(spans))

    @property
    def _name(self) -> str:
        return f"--tokenizer-model {self._tokenizer.name_or_path}"
