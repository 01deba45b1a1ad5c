"""One object that a training loop tells its metrics; it knows who else wants them.

    with RunRecorder(config, is_writer=rank == 0, options=vars(args), total_steps=300) as recorder:
        for step in range(1, 301):
            recorder.log(step, {"loss": loss, "tokens": tokens, "seconds": seconds})

Steps count finished updates (0 = before the first): a run that resumes from a checkpoint of step s
logs s + 1 next.  Once it runs, no file may stop a run: one that cannot be written is warned about
once, metrics.jsonl is written later if it can, and what the record lacks in the end is said in the
log, in config.json and on the page.  A process that is not the writer does nothing.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from megatron_ext.report.config import ReportConfig
from megatron_ext.report.event_sinks import TensorBoardEvents, WandbRun
from megatron_ext.report.gaps import Gaps
from megatron_ext.report.history import History
from megatron_ext.report.live_page import LivePage
from megatron_ext.report.metrics import MetricsFile, plain_metrics, read_metrics
from megatron_ext.report.notices import warn_once
from megatron_ext.report.output_folder import (
    CONFIG_NAME,
    METRICS_NAME,
    REPORT_NAME,
    TENSORBOARD_NAME,
    open_output_folder,
    usable,
)
from megatron_ext.report.progress import open_progress
from megatron_ext.report.run_record import RunRecord, RunRecordFile, describe_run
from megatron_ext.report.sink import Number, Outcome, RunStopped, Sink

logger = logging.getLogger(__name__)

# What writing and drawing may raise without the metrics being wrong: files, fonts, axes, viewers.
DISPLAY_ERRORS = (OSError, ValueError, ArithmeticError, RuntimeError, ImportError)


class RunRecorder:
    """Records one run.

    is_writer: true on exactly one process.
    options: every option of the run and its value, for config.json and the page.
    total_steps: step at which the run ends; None = not known.
    resume_step: step of the checkpoint that was loaded: what was recorded after it is cut.
    None = a new run: what an earlier one left in the folder moves to previous-N/.
    wandb_project: project to send the metrics to; None = no wandb.

    Raises:
        OSError: the folder cannot be used; names --output-dir.
    """

    def __init__(
        self,
        config: ReportConfig,
        *,
        is_writer: bool,
        options: Mapping[str, object],
        total_steps: int | None,
        resume_step: int | None = None,
        world_size: int = 1,
        wandb_project: str | None = None,
        wandb_name: str | None = None,
    ) -> None:
        if wandb_project is not None and config.output_dir is None:
            raise ValueError(
                f"--wandb-project {wandb_project} needs --output-dir: the id of the wandb run is "
                "kept there, so that a resumed run continues it. Name a folder, or drop the flag."
            )
        self._last_step = -1 if resume_step is None else resume_step
        self._is_open = is_writer
        self._metrics_file: MetricsFile | None = None
        self._displays: list[Sink] = []
        self.gaps = Gaps()
        self.resumed_metrics: dict[str, Number] = {}
        """What is recorded of the step that the run resumes from."""
        if not is_writer:
            return
        if config.output_dir is not None:
            record = describe_run(
                options, world_size=world_size, total_steps=total_steps, resume_step=resume_step
            )
            with usable(config.output_dir):
                folder = self._open_files(config.output_dir, config=config, record=record)
            if wandb_project is not None:
                name = wandb_name or config.run_title or folder.resolve().name
                self._displays.append(
                    WandbRun(folder, project=wandb_project, name=name, options=record.options)
                )
        if config.progress_interval_seconds > 0:
            self._displays.append(
                open_progress(
                    total_steps,
                    start_step=resume_step or 0,
                    interval_seconds=config.progress_interval_seconds,
                )
            )

    def _open_files(self, output_dir: str, *, config: ReportConfig, record: RunRecord) -> Path:
        """Open the folder and what is written in it; the folder."""
        resume_step = record.resume_step
        folder = open_output_folder(output_dir, is_new_run=resume_step is None)
        path, history, steps = folder / METRICS_NAME, History(), []
        self._metrics_file = MetricsFile(path, resume_step=resume_step)
        for step, metrics in read_metrics(path):
            history.add(step, metrics)
            steps.append(step)
            if step == resume_step:
                self.resumed_metrics = metrics
        if missing := _missing(steps, last=resume_step or 0):
            ends = f"ends at step {steps[-1]}" if steps else "has no step"
            reason = f"it {ends} but the run resumes from step {resume_step}"
            if steps and steps[-1] == resume_step:
                reason = "an earlier process of the run could not write them"
            self.gaps.lost(path, count=len(missing), what=_steps_in_words(missing), reason=reason)
        if config.tensorboard_events:
            events = TensorBoardEvents(folder / TENSORBOARD_NAME, resume_step=resume_step)
            self._displays.append(events)
        if config.report_html:
            self._displays.append(
                LivePage(
                    folder / REPORT_NAME,
                    title=config.run_title or folder.resolve().name,
                    record=record,
                    history=history,
                    interval_seconds=config.report_interval_seconds,
                )
            )
        self._displays.append(RunRecordFile(folder / CONFIG_NAME, record))
        return folder

    def log(self, step: int, metrics: Mapping[str, object]) -> None:
        """Record the metrics of one finished step, all of them in one call.

        Values: int, float or None (not measured at this step).  `tokens_per_second` is added where
        `tokens` and `seconds` are given.  Raises ValueError for other values and for a step that
        is not past the last one.
        """
        if not self._is_open:
            return
        if step <= self._last_step:
            raise ValueError(
                f"step {step} was logged after step {self._last_step}: steps count up, from the "
                "checkpoint's step + 1 after a resume, and all metrics of a step go into one call."
            )
        plain = with_throughput(plain_metrics(metrics))
        self._last_step = step
        file = self._metrics_file
        if file is not None:
            self._keep(file, lambda: file.write(step, plain))
        for display in self._displays:
            self._try(display, lambda display=display: display.write(step, plain))

    def amend(self, step: int, metrics: Mapping[str, object]) -> None:
        """Add metrics to the step that the run resumes from."""
        if not self._is_open:
            return
        plain, file = plain_metrics(metrics), self._metrics_file
        if file is not None:
            self._keep(file, lambda: file.amend(step, self.resumed_metrics | plain))
        for display in self._displays:
            self._try(display, lambda display=display: display.write(step, plain))

    def finish(self) -> None:
        """The run ended as it should; draws the final page.  A second end has no effect."""
        self._close(Outcome(status="finished"))

    def stop(self, reason: str) -> None:
        """The run was told to end; another process may continue it."""
        self._close(Outcome(status="stopped", reason=reason))

    def fail(self, exc: BaseException) -> None:
        """The run ends with an error, which the page shows.  Never raises itself."""
        reason = f"{type(exc).__name__}: {exc}"
        details = "".join(traceback.format_exception(exc))
        self._close(Outcome(status="failed", reason=reason, details=details))

    def _close(self, outcome: Outcome) -> None:
        if not self._is_open:
            return
        self._is_open = False
        file = self._metrics_file
        if file is not None:
            self._keep(file, lambda: file.close(outcome))
            if waiting := file.waiting_steps:
                reason = "the disk did not take them"
                words = _steps_in_words(waiting)
                self.gaps.lost(file.path, count=len(waiting), what=words, reason=reason)
        outcome = replace(outcome, gaps=self.gaps.sentences())
        if outcome.gaps:
            logger.warning("the record of this run is incomplete: %s", "; ".join(outcome.gaps))
        for display in self._displays:
            self._try(display, lambda display=display: display.close(outcome))

    def _keep(self, file: MetricsFile, action: Callable[[], None]) -> None:
        """Write metrics; what the disk does not take waits in the file's object."""
        try:
            action()
        except OSError as error:
            self.gaps.announce(file.path, reason=error.strerror or str(error))

    def _try(self, display: Sink, action: Callable[[], None]) -> None:
        try:
            action()
        except DISPLAY_ERRORS as error:
            name = f"{type(display).__name__} cannot show the metrics in {display.place}"
            warn_once(
                f"{name} and is tried again later, training goes on: "
                f"{type(error).__name__}: {error}",
                key=name,
            )

    def __enter__(self) -> RunRecorder:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        is_plain_exit = isinstance(exc, SystemExit) and not exc.code
        if exc is None or is_plain_exit:
            self.finish()
        elif isinstance(exc, RunStopped):
            self.stop(exc.reason)
        else:
            self.fail(exc)


def with_throughput(metrics: Mapping[str, Number]) -> dict[str, Number]:
    """The metrics and, if they have tokens and seconds, their ratio."""
    seconds = metrics.get("seconds", 0)
    if "tokens" not in metrics or not math.isfinite(seconds) or seconds <= 0:
        return dict(metrics)
    return {"tokens_per_second": metrics["tokens"] / seconds, **metrics}


def _missing(steps: Sequence[int], *, last: int) -> list[int]:
    """Steps up to `last` that are not in the list; 0, before the first update, need not be."""
    return sorted(set(range(1, last + 1)) - set(steps))


def _steps_in_words(steps: Sequence[int]) -> str:
    return f"steps ({steps[0]})" if len(steps) == 1 else f"steps ({steps[0]} to {steps[-1]})"
