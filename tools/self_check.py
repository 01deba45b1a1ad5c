"""Is this set-up right?  A table of checks on your own checkpoint and layout.

    torchrun --nproc-per-node 2 tools/self_check.py --hf-model DIR --tensor-model-parallel-size 2

A line is pass, FAIL or skipped, with the reason.  All other options are those of pretrain_rl.py.
Exit status 1 when a line fails.
"""

from __future__ import annotations

import sys

from megatron_ext.options.first_look import look_first

if __name__ == "__main__":
    # before the imports below, which take seconds
    look_first(sys.argv[1:], tool="self_check.py")

import argparse
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron_ext.options.job_parser import JobParser
from megatron_ext.options.paths import folder_problems
from megatron_ext.options.ranges import in_range
from megatron_ext.upstream.arguments import Options
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.evaluate import parse_for_evaluation
from megatron_ext.upstream.layout import close_layout
from megatron_ext.upstream.self_check import Line, run_checks
from megatron_ext.upstream.self_check_setup import open_setup, skipped
from megatron_ext.upstream.self_check_update import (
    NAME,
    WRITE_UPDATE,
    update_is_single_process,
    write_update,
)
from pretrain_rl import quiet_libraries


def build_parser() -> JobParser:
    """Options of this tool."""
    parser = JobParser(
        description="Check a set-up. Options not listed here are those of pretrain_rl.py.",
        allow_abbrev=False,
    )
    parser.add_argument("--hf-model", type=Path, help="checkpoint to check (or --load)")
    parser.add_argument(
        "--reference",
        type=Path,
        help="checkpoint that transformers loads for comparison (default --hf-model)",
    )
    parser.add_argument(
        "--seq-length",
        type=in_range(int, at_least=2),
        default=64,
        help="tokens of the sequences (default 64)",
    )
    parser.add_argument(
        "--scratch-dir",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="where the weights are written and read again; all ranks must see it",
    )
    parser.add_argument(
        "--no-single-process",
        dest="single_process",
        action="store_false",
        help="leave out the line that takes one update on a single process too, with memory for "
        "the whole model there",
    )
    parser.add_argument(WRITE_UPDATE, type=Path, help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 0 when no line fails.  Every rank calls it."""
    parser = build_parser()
    given = list(sys.argv[1:] if argv is None else argv)
    own, words = parser.parse_known_args(given)
    with device_mode():
        if own.hf_model:
            words += ["--hf-model", str(own.hf_model), "--tokenizer-type", "NullTokenizer"]
        try:
            if wrong := folder_problems(str(own.scratch_dir), flag="--scratch-dir"):
                raise ValueError(*wrong)
            options = parse_for_evaluation(words, seq_length=own.seq_length)
            return check(own, options, words=[__file__, *given])
        except (OSError, ValueError) as error:
            parser.error(str(error))


def check(own: argparse.Namespace, options: Options, *, words: Sequence[str]) -> int:
    """Run and print the lines, in a scratch folder that goes away again."""
    setup = open_setup(
        options,
        reference=own.reference or own.hf_model,
        scratch_dir=own.scratch_dir,
        words=words,
    )
    lines: list[Line] = []

    def show(line: Line) -> None:
        lines.append(line)
        if setup.layout.is_writer:
            print(table_row(line), flush=True)

    try:
        if own.write_update:
            write_update(setup, folder=own.write_update)
            return 0
        left_out = () if own.single_process else (update_is_single_process,)
        for line in run_checks(setup, leave_out=left_out):
            show(line)
        if left_out:
            show(skipped(NAME, reason="--no-single-process leaves it out"))
        if setup.layout.is_writer:
            print(summary(lines), flush=True)
    finally:
        if setup.layout.is_writer:
            shutil.rmtree(setup.scratch, ignore_errors=True)
        close_layout()
    return 1 if any(line.status == "FAIL" for line in lines) else 0


def table_row(line: Line) -> str:
    """One line of the table; what to do, or why it was skipped, only where it is needed."""
    row = f"{line.status:<7}  {line.name:<30} {line.number:<40}"
    return row.rstrip() if line.passed else f"{row} {line.advice}"


def summary(lines: Sequence[Line]) -> str:
    """How many lines ended how."""
    counts = Counter(line.status for line in lines)
    return ", ".join(f"{counts[status]} {status}" for status in ("pass", "FAIL", "skipped"))


if __name__ == "__main__":
    quiet_libraries()
    sys.exit(main())
