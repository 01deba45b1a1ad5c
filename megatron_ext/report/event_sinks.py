"""The same metrics for other viewers: TensorBoard event files and, on demand, Weights & Biases.

Every metric goes to both at every step, under its own name.  After a resume TensorBoard hides the
events past the checkpoint; wandb continues the run whose id lies in the output folder, and takes
steps that it has seen already for the same points again (the x axis is our step).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any
from uuid import uuid4

from megatron_ext.files.appended import AppendedFile
from megatron_ext.report.output_folder import replacing
from megatron_ext.report.sink import Number, Outcome


class TensorBoardEvents:
    """Writes scalars under `folder`; readers drop what an earlier process wrote past the resume.

    An event file is a row of framed records; each is appended whole or not at all.
    """

    def __init__(self, folder: Path, *, resume_step: int | None) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise ImportError(
                f"TensorBoard events need the package tensorboard ({error}). Install it with "
                "`pip install tensorboard`, or pass --no-tensorboard-events."
            ) from error
        events: Any = event_pb2  # their contents are made when they are imported
        summaries: Any = summary_pb2
        self._event, self._summary, self._framed = events.Event, summaries.Summary, RecordWriter
        self.place = str(folder)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendedFile(folder / f"{name}.{uuid4().hex[:8]}")
        first = [self._event(wall_time=time.time(), file_version="brain.Event:2")]
        if resume_step is not None:
            start = events.SessionLog(status=events.SessionLog.START)
            first.append(
                self._event(wall_time=time.time(), step=resume_step + 1, session_log=start)
            )
        self._first = b"".join(map(self._record, first))
        """What a file begins with; written before the first metrics."""

    def write(self, step: int, metrics: Mapping[str, Number]) -> None:
        values = [self._summary.Value(tag=n, simple_value=v) for n, v in metrics.items()]
        summary = self._summary(value=values)
        event = self._event(wall_time=time.time(), step=step, summary=summary)
        self._file.path.parent.mkdir(exist_ok=True)
        self._file.append(self._first + self._record(event))
        self._first = b""

    def close(self, outcome: Outcome) -> None:
        """Nothing is pending."""

    def _record(self, event: Any) -> bytes:
        framed = BytesIO()
        self._framed(framed).write(event.SerializeToString())
        return framed.getvalue()


class WandbRun:
    """Sends the metrics to run `name` of the wandb project, with the options as its config."""

    def __init__(
        self, folder: Path, *, project: str, name: str, options: Mapping[str, object]
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError(
                f"--wandb-project {project} needs the package wandb ({error}). Install it with "
                "`pip install wandb`, or leave the flag out."
            ) from error
        id_file = folder / "wandb_run_id"
        if not id_file.exists():
            with replacing(id_file) as file:
                file.write(uuid4().hex[:12])
        self.place = f"wandb project {project}"
        self._error = wandb.Error
        self._run = wandb.init(
            project=project,
            name=name,
            id=id_file.read_text(),
            resume="allow",
            dir=str(folder),
            config=dict(options),
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, Number]) -> None:
        try:
            self._run.log({"step": step, **metrics})
        except self._error as error:
            raise RuntimeError(f"wandb did not take step {step}: {error}") from error

    def close(self, outcome: Outcome) -> None:
        self._run.finish(exit_code=1 if outcome.status == "failed" else 0)
