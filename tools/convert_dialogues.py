"""Convert tau-bench result files to JSONL for --train-data.

    python tools/convert_dialogues.py tau_bench_airline.json train.jsonl --min-reward 1 \\
        --valid-output valid.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron_ext.data.json_lines import parse_value
from megatron_ext.data.tau_bench import chats_of_trials, split_by_task
from megatron_ext.options.ranges import in_range
from megatron_ext.report.whole_file import check_writable


def main(argv: Sequence[str] | None = None) -> None:
    """Read the input, write one or two files, and say how many dialogues each got."""
    parser = argparse.ArgumentParser(description="tau-bench result files to JSONL for training.")
    parser.add_argument("input", type=Path, help="result file of tau-bench (JSON)")
    parser.add_argument("output", type=Path, help="JSONL file to write, one dialogue a line")
    parser.add_argument(
        "--min-reward",
        type=in_range(float),
        help="keep only dialogues of at least this reward (1 = solved)",
    )
    parser.add_argument("--valid-output", type=Path, help="JSONL file for held-out tasks")
    parser.add_argument(
        "--valid-every",
        type=in_range(int, at_least=2),
        default=10,
        metavar="N",
        help="with --valid-output: hold out every N-th task, with all its trials (default 10)",
    )
    options = parser.parse_args(argv)
    for name in ("output", "valid_output"):
        if path := getattr(options, name):
            try:
                check_writable(path, flag="output" if name == "output" else "--valid-output")
            except ValueError as error:
                parser.error(str(error))
    try:
        chats = chats_of_trials(
            parse_value(options.input.read_bytes()), min_reward=options.min_reward
        )
    except (OSError, ValueError) as error:
        parser.error(f"{options.input}: {error}")
    if options.valid_output is None:
        write(options.output, chats)
        return
    train, valid = split_by_task(chats, every=options.valid_every)
    write(options.output, train)
    write(options.valid_output, valid)


def write(path: Path, chats: Sequence[dict]) -> None:
    """Write one chat a line and report it."""
    path.write_text(lines(chats), encoding="utf-8")
    rewards = [chat["reward"] for chat in chats]
    mean = sum(rewards) / max(len(rewards), 1)
    print(f"{path}: {len(chats)} dialogues, mean reward {mean:.3f}")


def lines(chats: Iterable[dict]) -> str:
    """JSON Lines."""
    return "".join(json.dumps(chat, ensure_ascii=False) + "\n" for chat in chats)


if __name__ == "__main__":
    sys.exit(main())
