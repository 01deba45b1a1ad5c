"""Tasks asked and answered in one turn of text: a prompt or a chat, a response, a grade.

The response is graded as text; the trained ids are those that were sampled, whatever their text.
Not covered: several turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from megatron_ext.environments.base import Observation, Task
from megatron_ext.environments.characters import CharacterTokenizer
from megatron_ext.rewards.base import Verdict
from megatron_ext.rollout.token_bytes import token_bytes

Message = Mapping[str, str]
"""{"role": ..., "content": ...}"""


class AskedTask(Task, Protocol):
    """A task with a prompt: a plain text, or the messages of a chat."""

    @property
    def prompt(self) -> str | Sequence[Message]:
        """What the policy is asked."""
        ...


class Grader(Protocol):
    """Says what a response is worth; may take its time, and may raise."""

    def __call__(self, task: Any, response: str) -> Verdict:
        """The verdict on a response, which is the decoded turn without its stop id."""
        ...


class TextCodec(Protocol):
    """Text to token ids and back."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end a response."""
        ...

    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """Ids of a prompt, up to where the response begins."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a response."""
        ...


class CharacterCodec:
    """Plain prompts and responses, one token a character; no chats."""

    def __init__(self, tokenizer: CharacterTokenizer, *, stop: str) -> None:
        self.stop_ids = frozenset(tokenizer.encode(stop))
        self._tokenizer = tokenizer

    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """Ids of a plain prompt."""
        if not isinstance(prompt, str):
            raise ValueError("a character tokenizer has no chat format: give tasks a `prompt`.")
        return self._tokenizer.encode(prompt)

    def decode(self, ids: Sequence[int]) -> str:
        """The characters."""
        return self._tokenizer.decode(ids)


class HuggingFaceCodec:
    """A tokenizer of `transformers` and its chat template."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        prompts_as_messages: bool = False,
        more_stop_ids: Iterable[int] = (),
        chat_template: str | None = None,
        template_name: str = "--chat-template",
    ) -> None:
        """A codec.

        prompts_as_messages: a plain prompt becomes one user message.
        more_stop_ids: that end a response, beside the tokenizer's end-of-text token.
        chat_template: replaces the tokenizer's own; template_name: where it was found.
        """
        # transformers takes seconds to import: only where there is a tokenizer of it
        from megatron_ext.data.hugging_face import HuggingFaceTokenizer

        self._tokenizer = tokenizer
        self._texts = HuggingFaceTokenizer(
            tokenizer, chat_template=chat_template, template_name=template_name
        )
        self._has_template = chat_template is not None or tokenizer.chat_template is not None
        self._prompts_as_messages = prompts_as_messages
        end = tokenizer.eos_token_id
        self.stop_ids: frozenset[int] = frozenset([*more_stop_ids, *([] if end is None else [end])])

    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """Ids of a plain prompt, begun as the tokenizer does, or of a chat up to the answer."""
        if isinstance(prompt, str) and not self._prompts_as_messages:
            return [*self._texts.start_ids, *self._texts.encode(prompt)]
        if not self._has_template:
            raise ValueError(
                "the tokenizer has no chat template: give tasks a `prompt`, and leave out "
                "--tasks-as-chat."
            )
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self._texts.encode_prompt([dict(message) for message in messages])

    def decode(self, ids: Sequence[int]) -> str:
        """The text, without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def token_bytes(self) -> list[bytes]:
        """What each token contributes to the text."""
        return token_bytes(self._tokenizer)


class TextEnvironment:
    """Asks, then grades."""

    is_instant = False

    def __init__(self, codec: TextCodec, grade: Grader) -> None:
        self._codec = codec
        self._grade = grade
        self._task: AskedTask | None = None

    @property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end the response."""
        return self._codec.stop_ids

    def reset(self, task: AskedTask, *, seed: int = 0) -> list[int]:
        """Ids of the prompt; the seed has no effect."""
        self._task = task
        return self._codec.encode(task.prompt)

    def step(self, sampled: Sequence[int]) -> Observation:
        """The reward of the response."""
        assert self._task is not None, "reset comes before step"
        ids = sampled[:-1] if sampled and sampled[-1] in self.stop_ids else sampled
        verdict = self._grade(self._task, self._codec.decode(ids))
        return Observation(reward=verdict.reward, done=True, warning=verdict.error)
