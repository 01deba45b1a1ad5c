"""Chat templates in a process of their own: what transformers writes, within limits."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from megatron_ext.data.chat_template import Rendering, View
from megatron_ext.data.hugging_face import HuggingFaceTokenizer, load_tokenizer
from megatron_ext.data.json_lines import BadRecord
from megatron_ext.data.template_process import ChatTemplate, TemplateProcess, UnusableTemplate
from tests.data.hostile import (
    ENDLESS_TEMPLATES,
    LARGE_TEMPLATES,
    REFUSED_TEMPLATES,
    tokenizer_folder,
)
from tests.data.tiny_tokenizer import CHATML, GENERATION, HERMES, byte_tokenizer
from tests.marks import slow_except

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": "é<", "b": [1, 2.5]}}}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "1+1?\n"},
    {"role": "assistant", "content": " 2\u2028é", "tool_calls": [CALL]},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "'sum' & <more>"}}]
FEATURES = (
    "{{ bos_token }}{%- for m in messages -%}\n  {% if loop.first %}{{ tools | tojson(indent=2) }}"
    "{% endif %}\n{{ m['content'] | trim }}{% if m.tool_calls is defined %}{% generation %}"
    "{{ m.tool_calls[0].function | tojson }}{% endgeneration %}{% continue %}{% endif %}"
    "{{ loop.index0 ~ m.role[::-1] ~ missing }}{% endfor %}{% set ns = namespace(n=0) %}"
    "{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ dict(a=documents) }}{{ strftime_now('%%') }}"
    "{{ 'prompt' if add_generation_prompt }}{{ messages | map(attribute='role') | join('-') }}"
)


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    """A process with a short limit."""
    process = TemplateProcess(cpu_seconds=0.2)
    yield process
    process.close()


def write(template: ChatTemplate, chat: list[dict[str, Any]] = CHAT) -> str:
    """A chat as the template writes it."""
    return template.write(chat, [View(count=len(chat))], variables={})[0].text


@pytest.mark.parametrize("source", [CHATML, HERMES, GENERATION, FEATURES])
def test_texts_are_those_of_transformers(source: str) -> None:
    has_blocks = "{% generation %}" in source
    for is_prompt in (False, True):
        variables = {"tools": TOOLS, "documents": None, "bos_token": "<s>"}
        texts, spans = render_jinja_template(
            [CHAT],
            chat_template=source,
            add_generation_prompt=is_prompt,
            return_assistant_tokens_mask=has_blocks,
            **variables,
        )
        blocks: Any = spans[0] if has_blocks else ()
        expected = Rendering(text=texts[0], generated=tuple(blocks))
        found = ChatTemplate(source, name="").write(
            CHAT, [View(count=2, is_prompt=is_prompt)], variables=variables
        )
        assert found == [expected]


def test_several_views_in_one_exchange() -> None:
    other = {"role": "assistant", "content": "other"}
    views = [View(count=0, is_prompt=True), View(count=1), View(count=2, last=other)]
    found = ChatTemplate(CHATML, name="").write(CHAT, views, variables={})
    for view, chat in zip(found, ([], CHAT[:1], [CHAT[0], other]), strict=True):
        [expected], _ = render_jinja_template(
            [chat], chat_template=CHATML, add_generation_prompt=not chat
        )
        assert view.text == expected


@pytest.mark.parametrize("case", REFUSED_TEMPLATES)
def test_r13_a_template_that_reaches_out_is_refused(case: str) -> None:
    """CASES R13: nothing leaves the sandbox, and the process lives on."""
    template = ChatTemplate(REFUSED_TEMPLATES[case], name="t.jinja")
    with pytest.raises(BadRecord, match="the chat template refuses it") as error:
        write(template)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("case", slow_except({"a product", "padding"}, LARGE_TEMPLATES))
def test_r13_a_template_of_a_huge_text_is_refused(case: str, process: TemplateProcess) -> None:
    """CASES R13: within seconds and bounded memory, naming the file."""
    template = ChatTemplate(LARGE_TEMPLATES[case], name="t.jinja", process=process)
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UnusableTemplate, match=r"the chat template in t\.jinja takes over"):
        write(template)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - own < 64 * 1024


@pytest.mark.parametrize("case", slow_except({"only for one question"}, ENDLESS_TEMPLATES))
def test_r13_an_endless_template_is_refused_once(case: str, process: TemplateProcess) -> None:
    """CASES R13: also where one conversation sets it off; nobody waits a second time."""
    template = ChatTemplate(ENDLESS_TEMPLATES[case], name="t.jinja", process=process)
    if case == "only for one question":
        assert write(template) == "fine"
    for _ in range(2):
        started = time.process_time()
        with pytest.raises(UnusableTemplate, match=r"t\.jinja takes over 0\.2 CPU seconds"):
            write(template, [{"role": "user", "content": "now"}])
    assert time.process_time() - started < 0.1
    assert write(ChatTemplate(CHATML, name="", process=process)).startswith("<|im_start|>user")


def test_r13_the_process_is_shut_in(process: TemplateProcess) -> None:
    """CASES R13: it can neither grow beyond 512 MiB more than it needs, nor open a file."""
    write(ChatTemplate(CHATML, name="", process=process))
    assert max(resource.prlimit(process.pid, resource.RLIMIT_AS)) < 1024 * 2**20
    assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (0, 0)


def test_r13_a_template_of_megabytes_is_refused_unread() -> None:
    """CASES R13."""
    with pytest.raises(UnusableTemplate, match=r"t\.jinja is longer than 1 MiB: correct it"):
        ChatTemplate("a" * 2**20 + "b", name="t.jinja")


def test_r13_the_file_of_a_tokenizers_own_template_is_named(tmp_path) -> None:
    """CASES R13."""
    (tokenizer_folder(tmp_path) / "chat_template.jinja").write_text("{{ 'a' * 10**9 }}")
    tokenizer = HuggingFaceTokenizer(load_tokenizer(tmp_path))
    with pytest.raises(UnusableTemplate, match=rf"{tmp_path}/chat_template\.jinja takes over 512"):
        tokenizer.encode_prompt(CHAT[:1])


def test_threads_share_the_process(process: TemplateProcess) -> None:
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        template = ChatTemplate("{{ messages[0].content }}" + str(number), name="", process=process)
        for _ in range(5):
            found[number] = write(template)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: f"1+1?\n{number}" for number in range(4)}


@pytest.mark.slow
def test_a_lost_process_is_started_anew() -> None:
    process = TemplateProcess()
    template = ChatTemplate(CHATML, name="", process=process)
    first = write(template)
    os.kill(process.pid, 9)
    with pytest.raises(UnusableTemplate, match="down the process that renders it"):
        write(template)
    assert write(ChatTemplate(CHATML, name="", process=process)) == first
    process.close()


def test_a_prompt_has_no_token_twice() -> None:
    """CASES N8: a template that writes the begin-of-text token gets no second one."""
    core = byte_tokenizer(template="<|im_start|>{{ messages[0].content }}")
    ids = HuggingFaceTokenizer(core).encode_prompt([{"role": "user", "content": "a"}])
    assert ids == core("<|im_start|>a", add_special_tokens=False).input_ids and len(ids) == 2
