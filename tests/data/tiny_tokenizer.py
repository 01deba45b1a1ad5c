"""Tokenizers made on the spot: one token a word, and one token a byte with a few merges."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HERMES = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls %}"
    '{{ \'<call>{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson + '}</call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
REWRITING = (
    "{% set ns = namespace(last=0) %}"
    "{% for message in messages %}"
    "{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' and loop.index0 > ns.last %}"
    "{{ '<think>' + message.thought + '</think>' }}{% endif %}"
    "{{ message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Thoughts only after the last question, as in Qwen3."""
GENERATION = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>"]


def word_tokenizer(words: str, *, template: str) -> PreTrainedTokenizerFast:
    """A token a word, ids in the order of `words`."""
    vocabulary = {word: id for id, word in enumerate(words.split())}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, chat_template=template, unk_token="?", eos_token="end"
    )


def byte_tokenizer(
    *,
    template: str | None = CHATML,
    merges: tuple[tuple[str, str], ...] = (),
    adds: str | None = None,
) -> PreTrainedTokenizerFast:
    """A token a byte, the merges, and the special tokens of ChatML; offsets without white space.

    merges: in the alphabet of byte-level BPE, where "Ġ" is a space and "Ċ" a new line.
    adds: what it puts around a text, such as "<|im_start|> $0 <|im_end|>".
    """
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(merge) for merge in merges]
    core = Tokenizer(models.BPE({s: id for id, s in enumerate(symbols)}, list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    if adds is not None:
        ids = [(token, core.token_to_id(token)) for token in SPECIAL]
        core.post_processor = processors.TemplateProcessing(single=adds, special_tokens=ids)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, chat_template=template, eos_token="<|im_end|>"
    )
