"""rollouts.jsonl and evaluations.jsonl: some episodes of each step, with text, ids and rewards.

A disk that does not take them, and the files' own limit, cost episodes, not the run.
Invariants the tests check: a resumed run leaves the lines of an uninterrupted one, whatever keys
tasks have; the files never exceed their size.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_ext.environments.episode import Episode
from megatron_ext.evaluation.transcripts import Decode, TranscriptFile, transcript
from megatron_ext.report.gaps import Gaps
from megatron_ext.report.output_folder import EVALUATIONS_NAME, ROLLOUTS_NAME


class Transcripts:
    """Writes a few episodes of each step on the writing rank; elsewhere nothing."""

    def __init__(
        self,
        folder: str | None,
        *,
        decode: Decode,
        per_step: int,
        max_bytes: int,
        resume_step: int | None,
        is_writer: bool,
        gaps: Gaps | None = None,
    ) -> None:
        """folder: of the run; None = nothing is written.  resume_step: lines after it are cut.

        gaps: told of episodes that could not be written.

        Raises:
            OSError: what an earlier process wrote cannot be cut.
        """
        self._decode = decode
        self._gaps = gaps or Gaps()
        self._max_bytes = max_bytes
        self._per_step = per_step
        self._files: dict[str, TranscriptFile] = {}
        if folder is None or not is_writer or per_step == 0:
            return
        for name in (ROLLOUTS_NAME, EVALUATIONS_NAME):
            path = Path(folder) / name
            cut_transcripts(path, last_step=-1 if resume_step is None else resume_step)
            self._files[name] = TranscriptFile(path, max_bytes=max_bytes)

    def add_rollouts(
        self, step: int, episodes: Sequence[Episode], *, advantages: Tensor | None = None
    ) -> None:
        """Some episodes of a step, with their advantages."""
        self._add(ROLLOUTS_NAME, step, episodes, advantages)

    def add_evaluation(self, step: int, episodes: Sequence[Episode]) -> None:
        """Some episodes of the evaluation after a step."""
        self._add(EVALUATIONS_NAME, step, episodes, None)

    def _add(
        self, name: str, step: int, episodes: Sequence[Episode], advantages: Tensor | None
    ) -> None:
        if name not in self._files:
            return
        for place in drawn_places(len(episodes), count=self._per_step, step=step):
            record = transcript(episodes[place], decode=self._decode, with_ids=True)
            extra = {} if advantages is None else {"advantage": float(advantages[place])}
            self._write(self._files[name], {"step": step, **extra, **record})

    def _write(self, file: TranscriptFile, record: dict[str, Any]) -> None:
        try:
            is_written = file.add(record)
            reason = f"it is at its limit of {self._max_bytes / 1e6:g} MB (--rollouts-megabytes)"
        except OSError as error:
            is_written, reason = False, error.strerror or str(error)
        if not is_written:
            self._gaps.lost(file.path, count=1, what="episodes", reason=reason)


def drawn_places(total: int, *, count: int, step: int) -> list[int]:
    """At most `count` places of `total`, drawn by the step's number alone."""
    return sorted(random.Random(step).sample(range(total), min(count, total)))


def cut_transcripts(path: Path, *, last_step: int) -> None:
    """Remove lines of later steps, and a torn end, in place.

    Files of older versions had the tasks' own keys beside ours: a `step` that is no number is a
    task's, and says nothing.
    """
    if not path.is_file():
        return
    with path.open("r+b") as file:
        kept, lacks_end = 0, False
        for line in file:
            record = _parsed(line)
            step = None if record is None else record.get("step")
            is_torn = record is None and not line.endswith(b"\n")
            if is_torn or (isinstance(step, int) and step > last_step):
                break
            kept += len(line)
            lacks_end = not line.endswith(b"\n")
        file.truncate(kept)
        if lacks_end:
            file.seek(kept)
            file.write(b"\n")


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
