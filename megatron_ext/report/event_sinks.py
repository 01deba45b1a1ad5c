"""The same metrics for other viewers: TensorBoard event files and, on demand, Weights & Biases.

Every metric goes to both at every step, under its own name.  After a resume TensorBoard hides the
events past the checkpoint; wandb continues the run whose id lies in the output folder, and takes
steps that it has seen already for the same points again (the x axis is our step).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

from megatron_ext.report.sink import Number, Outcome


class TensorBoardEvents:
    """Writes scalars under `folder`; readers drop what an earlier process wrote past the resume."""

    def __init__(self, folder: Path, *, resume_step: int | None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                f"TensorBoard events need the package tensorboard ({error}). Install it with "
                "`pip install tensorboard`, or pass --no-tensorboard-events."
            ) from error
        purge_step = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=30)

    def write(self, step: int, metrics: Mapping[str, Number]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self, outcome: Outcome) -> None:
        self._writer.close()


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
            id_file.write_text(uuid4().hex[:12])
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
