"""What episodes looked like, as JSONL that stops growing at a limit.

One line an episode: task, reward, how it ended, and the text of its parts.  What a task brings
along is in an object of its own, `metadata`: its keys are the user's, not the record's.
Invariants the tests check: the file never exceeds its limit; each line is a whole JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_ext.environments.episode import Episode
from megatron_ext.files.appended import AppendedFile
from megatron_ext.report.run_record import json_value

Decode = Callable[[Sequence[int]], str]


def transcript(
    episode: Episode, *, decode: Decode, max_characters: int = 4000, with_ids: bool = False
) -> dict[str, Any]:
    """An episode as a JSON object; each part is cut in its middle to `max_characters`.

    with_ids: also the token ids, and the log-probs of the sampled ones.
    """
    record: dict[str, Any] = {
        "task": episode.task_id,
        "group": episode.group,
        "sample": episode.sample,
        "reward": episode.reward,
        "end_reason": episode.end_reason,
        "tokens": len(episode.ids),
        "sampled_tokens": episode.num_sampled,
        "metadata": json_value(episode.metadata),
        "parts": [
            {"role": span.role, "text": shortened(decode(span.ids), max_characters)}
            for span in episode.spans()
        ],
    }
    if episode.error is not None:
        record["error"] = episode.error
    if episode.warnings:
        record["warnings"] = list(episode.warnings)
    if with_ids:
        record["ids"] = episode.ids
        record["logprobs"] = [round(value, 6) for value in episode.logprobs]
    return record


def shortened(text: str, max_characters: int) -> str:
    """A text with its middle left out where it is too long, and how much that was."""
    cut = len(text) - max_characters
    if cut <= 0:
        return text
    half = max_characters // 2
    return f"{text[:half]} [... {cut} characters ...] {text[len(text) - half :]}"


class TranscriptFile:
    """Appends transcripts to a file up to a size."""

    def __init__(self, path: str | Path, *, max_bytes: int) -> None:
        """A file at `path`, which is continued if it exists; what does not fit is counted."""
        self.path = Path(path)
        self._file = AppendedFile(self.path)
        self._room = max_bytes - (self.path.stat().st_size if self.path.exists() else 0)
        self.num_written = 0
        self.num_left_out = 0

    def add(self, record: dict[str, Any]) -> bool:
        """Append a record; False = its size has no room for it.

        Raises:
            OSError: the disk does not take it; nothing of it is left.
        """
        line = json.dumps(record, ensure_ascii=False, default=str).encode(errors="replace") + b"\n"
        if len(line) > self._room:
            self.num_left_out += 1
            return False
        self._file.append(line)
        self._room -= len(line)
        self.num_written += 1
        return True
