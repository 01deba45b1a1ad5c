"""Prints what the runs of several algorithms came to, as a Markdown table.

python examples/algorithms_compared/table.py outputs/algorithms_compared grpo rloo
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_ext.report.metrics import read_metrics

HEADER = "| algorithm | greedy | sampled | entropy | seconds a step |"


def row(folder: Path) -> str:
    """One run's line: pass rates before and after, and means over its steps."""
    steps = [metrics for _, metrics in read_metrics(folder / "metrics.jsonl")]
    first, last, trained = steps[0], steps[-1], steps[1:]
    rates = [
        f"{first[name]:.3f} to {last[name]:.3f}"
        for name in ("eval_pass_rate", "eval_pass_rate_sampled")
    ]
    seconds = sorted(metrics["seconds"] for metrics in trained)[len(trained) // 2]
    entropy = last["entropy_estimate"]
    return f"| `{folder.name}` | {rates[0]} | {rates[1]} | {entropy:.3f} | {seconds:.2f} |"


def main() -> None:
    """Write the table to the standard output."""
    output, *names = sys.argv[1:]
    lines = [HEADER, "|---|---|---|---|---|", *(row(Path(output) / name) for name in names)]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
