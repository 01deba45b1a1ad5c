"""Prints the steps of a reinforcement-learning run as a Markdown table.

python examples/grpo_gsm8k_smollm2/table.py outputs/grpo_gsm8k_smollm2/one_digit
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from megatron_ext.report.metrics import read_metrics

COLUMNS = {
    "reward": ("reward_mean", ".3f"),
    "pass rate": ("pass_rate", ".3f"),
    "cut": ("truncated_share", ".2f"),
    "without advantage": ("zero_advantage_share", ".2f"),
    "trained tokens": ("trained_tokens", ".0f"),
    "gradient norm": ("grad_norm", ".3g"),
    "sampler gap": ("sampler_gap", ".1e"),
    "rollout s": ("rollout_seconds", ".1f"),
    "train s": ("train_seconds", ".1f"),
    "all s": ("seconds", ".1f"),
}
"""Heading -> the metric below it, and its digits."""


def row(step: int, metrics: Mapping[str, float]) -> str:
    """One step's line; a metric that the step does not have is a dash."""
    cells = [
        format(metrics[name], digits) if name in metrics else "-"
        for name, digits in COLUMNS.values()
    ]
    return f"| {' | '.join([str(step), *cells])} |"


def table(folder: Path) -> str:
    """The lines of all trained steps of a run."""
    steps = [(step, metrics) for step, metrics in read_metrics(folder / "metrics.jsonl") if step]
    headings = ["step", *COLUMNS]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    return "\n".join([*lines, *(row(step, metrics) for step, metrics in steps)]) + "\n"


def main() -> None:
    """Write the table of each folder that the command line names."""
    for folder in sys.argv[1:]:
        sys.stdout.write(f"\n{Path(folder).name}\n\n{table(Path(folder))}")


if __name__ == "__main__":
    main()
