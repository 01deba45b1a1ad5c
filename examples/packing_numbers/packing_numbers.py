"""Padding, microbatches and rows for the lengths of seed document 000, out of our functions."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib

from megatron_ext.packing import allocate, pack, padding_share, token_budget_batches
from tools.benchmarks.lengths import AGENT_BUDGET, agent_lengths, episode_lengths

matplotlib.use("Agg")
from matplotlib import pyplot

COUNT = 8
ROW = 256


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables and write them to OUTPUT_DIR."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, required=True)
    folder = parser.parse_args(argv).output_dir
    folder.mkdir(parents=True, exist_ok=True)
    numbers = {"agents": agents(), "replicas": replicas(), "episodes": episodes()}
    (folder / "packing_numbers.json").write_text(json.dumps(numbers, indent=2) + "\n")
    draw(numbers["agents"]["ways"], folder / "packing_numbers.png")
    sys.stdout.write(as_text(numbers) + f"\nwritten to {folder}\n")


def agents() -> dict:
    """512 agent trajectories: four ways to make microbatches of them."""
    lengths, order = agent_lengths()
    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    budget = token_budget_batches(lengths, AGENT_BUDGET)
    rows = pack(lengths, AGENT_BUDGET)
    padded = {
        f"{COUNT} per microbatch, random": in_groups(order),
        f"{COUNT} per microbatch, sorted": in_groups(by_length),
        "token budget 131072, padded": budget,
    }
    ways = {
        name: {
            "microbatches": len(batches),
            "padding": padding_share(lengths, batches),
            "largest": max(padded_size(lengths, batch) for batch in batches),
        }
        for name, batches in padded.items()
    }
    ways["token budget 131072, packed"] = {
        "microbatches": len(rows),
        "padding": padding_share(lengths, rows, row_length=AGENT_BUDGET),
        "largest": AGENT_BUDGET,
    }
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    [in_budget] = [batch for batch in budget if longest in batch]
    [in_group] = [batch for batch in in_groups(order) if longest in batch]
    return {
        "sequences": len(lengths),
        "tokens": sum(lengths),
        "median": sorted(lengths)[(len(lengths) - 1) // 2],
        "longest": lengths[longest],
        "fewest_rows": sum(lengths) / AGENT_BUDGET,
        "ways": ways,
        "microbatch_of_the_longest": {
            f"{COUNT} per microbatch, random": padded_size(lengths, in_group),
            "token budget 131072, padded": padded_size(lengths, in_budget),
            "sequences in the latter": len(in_budget),
        },
    }


def replicas() -> list[dict]:
    """Work of the slowest of n replicas, which the step waits for, relative to packed rows."""
    lengths, order = agent_lengths()
    shuffled = [lengths[i] for i in order]
    fixed = in_groups(range(len(shuffled)))
    budget = token_budget_batches(shuffled, AGENT_BUDGET)
    found = []
    for count in (1, 2, 4, 8, 16, 32):
        packed = allocate(shuffled, max_tokens=AGENT_BUDGET, data_parallel_size=count)
        slowest = max(sum(shuffled[i] for row in rank for i in row) for rank in packed)
        dealt = {
            name: max(
                sum(padded_size(shuffled, b) for b in batches[r::count]) for r in range(count)
            )
            for name, batches in (("fixed count", fixed), ("padded budget", budget))
        }
        found.append(
            {
                "replicas": count,
                **{name: work / slowest for name, work in dealt.items()},
                "packed against an even share": slowest * count / sum(shuffled),
            }
        )
    return found


def episodes() -> dict:
    """64 episodes with the seed's quantiles: one padded batch, and rows of 256."""
    lengths = episode_lengths(64)
    rows = pack(lengths, ROW)
    everything = [list(range(len(lengths)))]
    return {
        "sequences": len(lengths),
        "tokens": sum(lengths),
        "padded_positions": padded_size(lengths, everything[0]),
        "padding": padding_share(lengths, everything),
        "rows": len(rows),
        "fill": 1 - padding_share(lengths, rows, row_length=ROW),
    }


def in_groups(order: Sequence[int]) -> list[list[int]]:
    """COUNT sequences a microbatch, in this order."""
    return [list(order[i : i + COUNT]) for i in range(0, len(order), COUNT)]


def padded_size(lengths: Sequence[int], batch: Sequence[int]) -> int:
    """Positions of a padded microbatch."""
    return len(batch) * max(lengths[i] for i in batch)


def as_text(numbers: dict) -> str:
    """The seed's tables."""
    agent, episode = numbers["agents"], numbers["episodes"]
    lines = [
        f"{name:<28} | {way['microbatches']:4d} microbatches | padding {way['padding']:5.1%} | "
        f"largest {way['largest'] / 1e3:4.0f}k tokens"
        for name, way in agent["ways"].items()
    ]
    longest = agent["microbatch_of_the_longest"]
    shares = [
        f"{row['replicas']:2d} replicas: work of the slowest, packed = 1: fixed count "
        f"{row['fixed count']:.2f}, padded budget {row['padded budget']:.2f} "
        f"(packed = {row['packed against an even share']:.3f} of an even share)"
        for row in numbers["replicas"]
    ]
    return "\n".join(
        [
            *lines,
            f"rows that the tokens would fill: {agent['fewest_rows']:.2f}",
            f"longest trajectory: {agent['longest']:,} tokens; median {agent['median']:,}",
            f"its microbatch: fixed count {longest[f'{COUNT} per microbatch, random']:,} tokens, "
            f"token budget {longest['token budget 131072, padded']:,} "
            f"({longest['sequences in the latter']} sequences)",
            *shares,
            f"{episode['sequences']} episodes padded: {episode['padded_positions']} positions for "
            f"{episode['tokens']} tokens, {episode['padding']:.0%} padding",
            f"{episode['sequences']} episodes packed: {episode['rows']} rows of {ROW}, "
            f"fill {episode['fill']:.1%}",
        ]
    )


def draw(ways: dict, file: Path) -> None:
    """Padding and the largest microbatch of each way."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3), sharey=True)
    left.barh(list(ways), [100 * way["padding"] for way in ways.values()], color="#4c72b0")
    left.set_xlabel("positions that hold no token, %")
    left.invert_yaxis()
    right.barh(list(ways), [way["largest"] / 1e3 for way in ways.values()], color="#dd8452")
    right.set_xlabel("largest microbatch, thousand tokens")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
