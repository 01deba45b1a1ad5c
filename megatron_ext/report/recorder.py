"""One object that a training loop tells its metrics; it knows who else wants them.

    with RunRecorder(config, is_writer=rank == 0, options=vars(args), total_steps=300) as recorder:
        for step in range(1, 301):
            recorder.log(step, {"loss": loss, "tokens": tokens, "seconds": seconds})

Steps count finished updates (0 = before the first): a run that resumes from a checkpoint of step s
logs s + 1 next.  Only metrics.jsonl may stop a run, with an error that names the file; a page,
event file or progress line that cannot be written is warned about once.  A process that is not the
writer does nothing.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from megatron_ext.report.config import ReportConfig
from megatron_ext.report.event_sinks import TensorBoardEvents, WandbRun
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
)
from megatron_ext.report.progress import open_progress
from megatron_ext.report.run_record import RunRecord, describe_run, write_run_record
from megatron_ext.report.sink import Number, Outcome, Sink

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
        if not is_writer:
            return
        if config.output_dir is not None:
            folder = open_output_folder(config.output_dir, is_new_run=resume_step is None)
            record = describe_run(
                options, world_size=world_size, total_steps=total_steps, resume_step=resume_step
            )
            write_run_record(folder / CONFIG_NAME, record)
            self._metrics_file = MetricsFile(folder / METRICS_NAME, resume_step=resume_step)
            _warn_of_missing_steps(self._metrics_file, resume_step=resume_step, folder=folder)
            title = config.run_title or folder.resolve().name
            self._displays += _open_displays(config, folder, record=record, title=title)
            if wandb_project is not None:
                name = wandb_name or title
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

    def log(self, step: int, metrics: Mapping[str, object]) -> None:
        """Record the metrics of one finished step, all of them in one call.

        Values: int, float or None (not measured at this step).  `tokens_per_second` is added where
        `tokens` and `seconds` are given.  Raises ValueError for other values and for a step that
        is not past the last one, OSError when metrics.jsonl cannot be written.
        """
        if not self._is_open:
            return
        if step <= self._last_step:
            raise ValueError(
                f"step {step} was logged after step {self._last_step}: steps count up, from the "
                "checkpoint's step + 1 after a resume, and all metrics of a step go into one call."
            )
        plain = with_throughput(plain_metrics(metrics))
        if self._metrics_file is not None:
            self._metrics_file.write(step, plain)
        self._last_step = step
        for display in self._displays:
            _warn_on_error(display, lambda display=display: display.write(step, plain))

    def finish(self) -> None:
        """The run ended as it should; draws the final page.  A second end has no effect."""
        self._close(Outcome(status="finished"))

    def fail(self, exc: BaseException) -> None:
        """The run ends with an error, which the page shows.  Never raises itself."""
        reason = f"{type(exc).__name__}: {exc}"
        details = "".join(traceback.format_exception(exc))
        self._close(Outcome(status="failed", reason=reason, details=details))

    def _close(self, outcome: Outcome) -> None:
        if not self._is_open:
            return
        self._is_open = False
        file = [] if self._metrics_file is None else [self._metrics_file]
        for sink in file + self._displays:
            _warn_on_error(sink, lambda sink=sink: sink.close(outcome))

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
        else:
            self.fail(exc)


def with_throughput(metrics: Mapping[str, Number]) -> dict[str, Number]:
    """The metrics and, if they have tokens and seconds, their ratio."""
    seconds = metrics.get("seconds", 0)
    if "tokens" not in metrics or not math.isfinite(seconds) or seconds <= 0:
        return dict(metrics)
    return {"tokens_per_second": metrics["tokens"] / seconds, **metrics}


def _open_displays(
    config: ReportConfig, folder: Path, *, record: RunRecord, title: str
) -> list[Sink]:
    displays: list[Sink] = []
    if config.tensorboard_events:
        displays.append(
            TensorBoardEvents(folder / TENSORBOARD_NAME, resume_step=record.resume_step)
        )
    if config.report_html:
        history = History()
        for step, metrics in read_metrics(folder / METRICS_NAME):
            history.add(step, metrics)
        displays.append(
            LivePage(
                folder / REPORT_NAME,
                title=title,
                record=record,
                history=history,
                interval_seconds=config.report_interval_seconds,
            )
        )
    return displays


def _warn_on_error(sink: Sink, action: Callable[[], None]) -> None:
    name = type(sink).__name__
    try:
        action()
    except DISPLAY_ERRORS as error:
        warn_once(
            f"{name} cannot show the metrics and is tried again later, training goes on: "
            f"{type(error).__name__}: {error}",
            key=f"display {name}",
        )


def _warn_of_missing_steps(file: MetricsFile, *, resume_step: int | None, folder: Path) -> None:
    if resume_step is not None and file.last_step is not None and file.last_step < resume_step:
        logger.warning(
            "%s ends at step %d but the run resumes from step %d: the steps between are missing.",
            folder / METRICS_NAME,
            file.last_step,
            resume_step,
        )
