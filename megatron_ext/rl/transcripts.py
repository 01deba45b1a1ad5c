"""rollouts.jsonl and evaluations.jsonl: some episodes of each step, with text, ids and rewards.

Invariants the tests check: a resumed run leaves the lines of an uninterrupted one; the files never
exceed their size.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from megatron_ext.environments.episode import Episode
from megatron_ext.evaluation.transcripts import Decode, TranscriptFile, transcript
from megatron_ext.report.output_folder import EVALUATIONS_NAME, ROLLOUTS_NAME, replacing


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
    ) -> None:
        """folder: of the run; None = nothing is written.  resume_step: lines after it are cut."""
        self._decode = decode
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
            self._files[name].add({"step": step, **extra, **record})


def drawn_places(total: int, *, count: int, step: int) -> list[int]:
    """At most `count` places of `total`, drawn by the step's number alone."""
    return sorted(random.Random(step).sample(range(total), min(count, total)))


def cut_transcripts(path: Path, *, last_step: int) -> None:
    """Remove lines of later steps, and a torn end."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines, replacing(path) as kept:
        for line in lines:
            try:
                step = json.loads(line)["step"]
            except json.JSONDecodeError:
                break
            if step > last_step:
                break
            kept.write(line)
