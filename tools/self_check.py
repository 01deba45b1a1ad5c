"""Is this set-up right?  A table of checks on your own checkpoint and layout.

    torchrun --nproc-per-node 2 tools/self_check.py --hf-model DIR --tensor-model-parallel-size 2

All other options are those of pretrain_rl.py.  Exit status 1 when a line fails.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron_ext.upstream.arguments import Options
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.evaluate import parse_for_evaluation
from megatron_ext.upstream.layout import close_layout
from megatron_ext.upstream.self_check import Line, run_checks
from megatron_ext.upstream.self_check_setup import open_setup
from megatron_ext.upstream.self_check_update import (
    WRITE_UPDATE,
    update_is_single_process,
    write_update,
)
from pretrain_rl import quiet_libraries


def build_parser() -> argparse.ArgumentParser:
    """Options of this tool."""
    parser = argparse.ArgumentParser(
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
        "--seq-length", type=int, default=64, help="tokens of the sequences (default 64)"
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
    """Print the table; 0 when every line passes.  Every rank calls it."""
    parser = build_parser()
    given = list(sys.argv[1:] if argv is None else argv)
    own, words = parser.parse_known_args(given)
    with device_mode():
        if own.hf_model:
            words += ["--hf-model", str(own.hf_model), "--tokenizer-type", "NullTokenizer"]
        try:
            options = parse_for_evaluation(words, seq_length=own.seq_length)
            return check(own, options, words=[__file__, *given])
        except ValueError as error:
            parser.error(str(error))


def check(own: argparse.Namespace, options: Options, *, words: Sequence[str]) -> int:
    """Run and print the lines, in a scratch folder that goes away again."""
    setup = open_setup(
        options,
        reference=own.reference or own.hf_model,
        scratch_dir=own.scratch_dir,
        words=words,
    )
    lines = []
    try:
        if own.write_update:
            write_update(setup, folder=own.write_update)
            return 0
        left_out = () if own.single_process else (update_is_single_process,)
        for line in run_checks(setup, leave_out=left_out):
            lines.append(line)
            if setup.layout.is_writer:
                print(table_row(line), flush=True)
    finally:
        if setup.layout.is_writer:
            shutil.rmtree(setup.scratch, ignore_errors=True)
        close_layout()
    return 0 if all(line.passed for line in lines) else 1


def table_row(line: Line) -> str:
    """One line of the table; the advice only where it is needed."""
    row = f"{'pass' if line.passed else 'FAIL'}  {line.name:<30} {line.number:<40}"
    return row.rstrip() if line.passed and line.number != "-" else f"{row} {line.advice}"


if __name__ == "__main__":
    quiet_libraries()
    sys.exit(main())
