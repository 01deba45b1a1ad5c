"""What can be chosen about the record of a run; every field is a flag of the same name."""

# No `from __future__ import annotations`: the flag factory reads the annotations as types.
from dataclasses import dataclass

from megatron_ext.options.ranges import Ranged, ranged


@dataclass(frozen=True, kw_only=True)
class ReportConfig(Ranged):
    """Where a run records its metrics and how often it shows them."""

    output_dir: str | None = None
    """Folder for metrics.jsonl, config.json, report.html and the tensorboard/ events of this run,
    created if absent; unset = nothing is recorded, only the progress is shown."""

    run_title: str | None = None
    """Title of report.html and name of the wandb run; unset = the name of the output folder."""

    report_html: bool = True
    """Do not draw report.html in the output folder (on by default)."""

    report_interval_seconds: float = ranged(
        30.0, at_least=0, at_most=1e9, note="0 = only at the end"
    )
    """Least seconds between two redraws of report.html while training; a redraw that is slow is
    repeated less often, so that drawing stays under 2 percent of the time. 0 = only at the end."""

    tensorboard_events: bool = True
    """Do not write TensorBoard events under tensorboard/ in the output folder (on by default)."""

    progress_interval_seconds: float = ranged(5.0, at_least=0, at_most=1e9, note="0 = no progress")
    """Least seconds between two progress lines when stderr is not a terminal; on a terminal a bar
    is drawn instead. 0 = no progress at all."""

    def wrong_values(self) -> list[str]:
        """A sentence for each value that is wrong by itself."""
        wrong = super().wrong_values()
        if self.output_dir is not None and not self.output_dir.strip():
            wrong.append("--output-dir is empty: name a folder, or leave the flag out.")
        return wrong
