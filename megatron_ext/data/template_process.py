"""Chat templates rendered by a process of its own, which a template cannot outgrow or outlast.

Templates come from folders that nobody has checked, and Jinja's sandbox bounds neither their time
nor their memory.  One process (`template_worker.py`) serves all templates of this one; it is
started when it is first needed, and writes all views of a chat in one exchange.
Invariant the tests check: any template gives its text or an error that names it, within the limits.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_ext.data.chat_template import Rendering, View
from megatron_ext.data.json_lines import BadRecord
from megatron_ext.data.records import Message
from megatron_ext.data.tokenizer_files import MAX_TEMPLATE_BYTES

CPU_SECONDS = 5.0
"""Of one rendering; usual ones take milliseconds."""
MEMORY_MIB = 512
CLOCK_SECONDS = 120.0
"""After which even a process that gets little of the CPU is given up."""
_ROOT = Path(__file__).resolve().parents[2]


class UnusableTemplate(ValueError):
    """A chat template that goes over a limit: of no use for any chat."""


class ChatTemplate:
    """A template and where it was found.

    process: that renders it; None = the one of all templates.

    Raises:
        UnusableTemplate: its text is too long.
    """

    def __init__(self, source: str, *, name: str, process: TemplateProcess | None = None) -> None:
        self.source = source
        self._process = process or _PROCESS
        self._name = name
        self._why_unusable = ""
        if len(source.encode("utf-8", "surrogatepass")) > MAX_TEMPLATE_BYTES:
            self._give_up(f"is longer than {MAX_TEMPLATE_BYTES >> 20} MiB")

    def write(
        self,
        messages: Sequence[Message],
        views: Sequence[View],
        *,
        variables: Mapping[str, Any],
    ) -> list[Rendering]:
        """Each view of the messages as the template writes it.

        variables: what the template may use besides the messages.

        Raises:
            BadRecord: it does not take these messages.
            UnusableTemplate: it goes over a limit, now or earlier.
        """
        if self._why_unusable:
            raise UnusableTemplate(self._why_unusable)
        request = {"messages": messages, "views": list(map(asdict, views)), "variables": variables}
        reply = self._process.ask(self.source, request)
        if "over" in reply:
            self._give_up(f"takes {reply['over']} to write one chat")
        for view in reply["views"]:
            if "refused" in view:
                raise BadRecord(f"the chat template refuses it ({view['refused']})")
        return [
            Rendering(text=view["text"], generated=tuple((a, b) for a, b in view["generated"]))
            for view in reply["views"]
        ]

    def _give_up(self, reason: str) -> None:
        self._why_unusable = (
            f"the chat template in {self._name} {reason}: correct it, or give another one as "
            "--chat-template."
        )
        raise UnusableTemplate(self._why_unusable)


class TemplateProcess:
    """The process that renders, of this process and its threads; started anew when it is lost."""

    def __init__(
        self, *, cpu_seconds: float = CPU_SECONDS, clock_seconds: float = CLOCK_SECONDS
    ) -> None:
        self._cpu_seconds, self._clock_seconds = cpu_seconds, clock_seconds
        self._lock = threading.Lock()
        self._owner = -1
        self._keys: dict[str, int] = {}

    def ask(self, source: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply of `template_worker` to a request; {"over": what} where that was lost."""
        with self._lock:
            if self._owner != os.getpid():
                self._start()
            is_new = {} if source in self._keys else {"source": source}
            key = {"key": self._keys.setdefault(source, len(self._keys))}
            line = json.dumps({**request, **key, **is_new}).encode()
            reply = self._exchange(line + b"\n")
            if reply is None or "over" in reply:
                self._end()
                self._owner = -1
            return reply or {"over": self._cause_of_death()}

    @property
    def pid(self) -> int:
        """Of the process that was started last."""
        return self._process.pid

    def close(self) -> None:
        """End the process, if there is one; a later `ask` starts another."""
        with self._lock:
            if self._owner == os.getpid():
                self._end()
                self._owner = -1

    def _start(self) -> None:
        paths = filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")])
        command = [sys.executable, "-m", "megatron_ext.data.template_worker"]
        process = subprocess.Popen(
            [*command, str(self._cpu_seconds), str(MEMORY_MIB)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # Ctrl-C is for the trainer
        )
        assert process.stdin is not None and process.stdout is not None
        self._process, self._owner, self._keys = process, os.getpid(), {}
        self._requests, self._replies = process.stdin.fileno(), process.stdout.fileno()
        self._end = weakref.finalize(self, _kill, process, os.getpid())
        if self._exchange(b"") is None:
            self._end()
            self._owner = -1
            raise RuntimeError(
                "the process that renders chat templates did not start (exit status "
                f"{process.returncode}). See why with: {sys.executable} -c "
                "'import megatron_ext.data.template_worker'"
            )

    def _exchange(self, line: bytes) -> dict[str, Any] | None:
        """Write a line, read one; None = the process died or said nothing in time."""
        self._is_late = False
        deadline = time.monotonic() + self._clock_seconds
        parts: list[bytes] = []
        try:
            while line:
                line = line[os.write(self._requests, line) :]
            with selectors.DefaultSelector() as selector:
                selector.register(self._replies, selectors.EVENT_READ)
                while not parts or not parts[-1].endswith(b"\n"):
                    if not selector.select(timeout=max(0.0, deadline - time.monotonic())):
                        self._is_late = True
                        return None
                    parts.append(os.read(self._replies, 2**20))
                    if not parts[-1]:
                        return None
        except BrokenPipeError:
            return None
        return json.loads(b"".join(parts))

    def _cause_of_death(self) -> str:
        if self._is_late:
            return f"over {self._clock_seconds:g} seconds"
        if self._process.returncode == -signal.SIGPROF:
            return f"over {self._cpu_seconds:g} CPU seconds"
        return f"down the process that renders it (exit status {self._process.returncode})"


def _kill(process: subprocess.Popen[bytes], owner: int) -> None:
    """End the process; a forked copy of the owner leaves it alone."""
    if os.getpid() != owner:
        return
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    if process.poll() is None:
        process.kill()  # it holds nothing that must be put away
    process.wait()
    process.stdout.close()


_PROCESS = TemplateProcess()
