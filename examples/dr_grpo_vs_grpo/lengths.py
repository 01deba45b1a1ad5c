"""Prints how long the answers of some runs were, right and wrong ones apart, as a Markdown table.

python examples/dr_grpo_vs_grpo/lengths.py RUN_OF_GRPO RUN_OF_DR_GRPO
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import batched
from pathlib import Path

from megatron_ext.report.metrics import read_metrics

STEPS_A_ROW = 10


def mean(steps: Sequence[dict[str, float]], name: str) -> float:
    """Of the steps that have the metric."""
    found = [metrics[name] for metrics in steps if name in metrics]
    return sum(found) / len(found) if found else float("nan")


def rows(folder: Path) -> list[str]:
    """A line for every ten steps of a run."""
    trained = [(step, metrics) for step, metrics in read_metrics(folder / "metrics.jsonl") if step]
    lines = []
    for part in batched(trained, STEPS_A_ROW):
        steps = [metrics for _, metrics in part]
        passed, failed, rate = (
            mean(steps, name)
            for name in ("response_tokens_passed", "response_tokens_failed", "pass_rate")
        )
        span = f"{part[0][0]} to {part[-1][0]}"
        lines.append(f"| `{folder.name}` | {span} | {passed:.1f} | {failed:.1f} | {rate:.3f} |")
    return lines


def main() -> None:
    """Write the table to the standard output."""
    head = [
        "| algorithm | steps | tokens, right | tokens, wrong | pass rate |",
        "|---|---|---|---|---|",
    ]
    lines = [*head, *(line for name in sys.argv[1:] for line in rows(Path(name)))]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
