"""A process that renders chat templates for another one, within limits of time and memory.

Lines of JSON.  On stdin a chat, several views of which are written:
    {"key", "messages", "variables", "views": [{"count", "is_prompt", "last"}, ...]}
with the template's "source" the first time its key is used; "last", if given, replaces the last of
the "count" messages.  On stdout {"views": [...]}, of each {"text", "generated"} or {"refused":
reason} where the template does not take the chat; or {"over": limit}.  A view that takes too
much CPU time ends the process.  It opens no file once it is ready, and ends when stdin does.
Run as `python -m megatron_ext.data.template_worker CPU_SECONDS MEMORY_MIB`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from jinja2 import Template

from megatron_ext.data.template_sandbox import REFUSALS, compiled, render

WARM_UP = (
    "{% set ns = namespace(a=1) %}{% for m in messages %}{% generation %}{{ m.a | tojson | trim }}"
    "{% endgeneration %}{% endfor %}{{ strftime_now('%Y') }}"
    "{{ lipsum(n=1) | striptags | wordwrap | pprint | urlize }}{{ raise_exception('ready') }}"
)
"""Uses what imports modules when it is used, which is too late once no file can be opened."""
MOST_WRITTEN = 2**20
"""Characters of a text, and TIMES_READ for each byte of its chat."""
TIMES_READ = 8
MOST_SAID = 300
"""Characters of a reason; a template may give one of any length."""


def serve(*, cpu_seconds: float, memory_mib: int) -> None:
    """Answer the requests on stdin until it is closed."""
    with os.fdopen(os.dup(1), "wb", buffering=0) as replies:
        os.dup2(2, 1)  # what libraries print goes elsewhere
        _text(compiled(WARM_UP), {"messages": [{"a": "b"}]})
        _shut_in(memory_mib)
        replies.write(b'{"ready": true}\n')
        templates: dict[int, Template | str] = {}
        for line in sys.stdin.buffer:
            try:
                reply = json.dumps(_reply(line, templates, cpu_seconds=cpu_seconds)).encode()
            except MemoryError:
                reply = json.dumps({"over": f"over {memory_mib} MiB of memory"}).encode()
            _write(replies.fileno(), reply + b"\n")


def _reply(
    line: bytes, templates: dict[int, Template | str], *, cpu_seconds: float
) -> dict[str, Any]:
    request = json.loads(line)
    key, messages = request["key"], request["messages"]
    views = []
    for view in request["views"]:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        if "source" in request and key not in templates:
            templates[key] = _compiled(request["source"])
        last = [view["last"]] if view["last"] is not None else messages[view["count"] - 1 :]
        shown = [*messages[: view["count"] - 1], *last[:1]] if view["count"] else []
        variables = {"messages": shown, "add_generation_prompt": view["is_prompt"]}
        views.append(_text(templates[key], request["variables"] | variables))
        most = MOST_WRITTEN + TIMES_READ * len(line)
        if len(views[-1].get("text", "")) > most:
            return {"over": f"over {most} characters"}
    signal.setitimer(signal.ITIMER_PROF, 0)
    return {"views": views}


def _text(template: Template | str, variables: dict[str, Any]) -> dict[str, Any]:
    if isinstance(template, str):
        return {"refused": template}
    try:
        text, generated = render(template, variables)
    except REFUSALS as error:
        return {"refused": _reason(error)}
    return {"text": text, "generated": generated}


def _compiled(source: str) -> Template | str:
    """The template, or why it is none."""
    try:
        return compiled(source)
    except REFUSALS as error:
        return _reason(error)


def _reason(error: Exception) -> str:
    return str(error)[:MOST_SAID] or type(error).__name__


def _shut_in(memory_mib: int) -> None:
    """Let this process grow no further, open nothing, and end when its timer does."""
    if sys.platform == "linux":
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        most = in_use + memory_mib * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)


def _write(descriptor: int, reply: bytes) -> None:
    while reply:
        reply = reply[os.write(descriptor, reply) :]


if __name__ == "__main__":
    serve(cpu_seconds=float(sys.argv[1]), memory_mib=int(sys.argv[2]))
