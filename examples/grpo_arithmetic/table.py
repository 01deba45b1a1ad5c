"""Prints the evaluations of some runs side by side, and where their rewards first differ.

python examples/grpo_arithmetic/table.py outputs/grpo_arithmetic outputs/grpo_tp2
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

from megatron_ext.report.metrics import read_metrics

COLUMNS = {
    "greedy": ("eval_pass_rate", ".3f"),
    "sampled": ("eval_pass_rate_sampled", ".3f"),
    "KL": ("kl_reference", ".4f"),
}
"""Heading -> the metric below it, and its digits."""


def main() -> None:
    """Write the table to the standard output."""
    folders = [Path(name) for name in sys.argv[1:]]
    runs = [dict(read_metrics(folder / "metrics.jsonl")) for folder in folders]
    headings = ["step", *(f"{name}, {folder.name}" for folder in folders for name in COLUMNS)]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for step in runs[0]:
        if "eval_pass_rate" in runs[0][step]:
            cells = [
                format(run[step][name], digits) if name in run[step] else ""
                for run in runs
                for name, digits in COLUMNS.values()
            ]
            lines.append(f"| {' | '.join([str(step), *cells])} |")
    for one, other in pairwise(runs):
        differ = [s for s in one if one[s].get("reward_mean") != other[s].get("reward_mean")]
        lines.append(f"\nsteps whose mean reward differs: {differ or 'none'}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
