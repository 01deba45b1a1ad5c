"""What a checkpoint is worth on text.

    torchrun --nproc-per-node 1 tools/evaluate.py perplexity --hf-model DIR --text FILE
    torchrun --nproc-per-node 2 tools/evaluate.py perplexity --hf-model DIR --text FILE \\
        --tensor-model-parallel-size 2 --tokens-out now.npz --compare before.npz

All other options are those of pretrain_rl.py: the layout, --bf16, --load with its architecture.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_ext.evaluation.perplexity import (
    TokenScores,
    mean_nll,
    paired_difference,
    read_scores,
    sliding_windows,
)
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.evaluate import (
    open_stepper,
    parse_for_evaluation,
    read_tokens,
    score_windows,
)
from megatron_ext.upstream.layout import close_layout
from pretrain_rl import quiet_libraries


def build_parser() -> argparse.ArgumentParser:
    """Options of this tool."""
    parser = argparse.ArgumentParser(
        description="Evaluate a checkpoint. Options not listed here are those of pretrain_rl.py.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    perplexity = commands.add_parser(
        "perplexity", help="negative log-likelihood per token of a text", allow_abbrev=False
    )
    perplexity.add_argument("--text", type=Path, required=True, help="UTF-8 text file")
    perplexity.add_argument(
        "--window", type=int, default=512, help="tokens the model sees at once (default 512)"
    )
    perplexity.add_argument(
        "--stride",
        type=int,
        help="tokens from one window's start to the next's; what two windows share is context of "
        "the second (default: the window, no overlap)",
    )
    perplexity.add_argument("--max-windows", type=int, help="only the first windows (default all)")
    perplexity.add_argument("--tokens-out", type=Path, help="npz file for the NLL of every token")
    perplexity.add_argument(
        "--compare", type=Path, help="--tokens-out of another checkpoint: paired difference"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Score, print the figures and write the files; every rank calls it."""
    parser = build_parser()
    own, words = parser.parse_known_args(argv)
    if any(word.split("=")[0] == "--seq-length" for word in words):
        parser.error("--seq-length: the sequences here are the windows; use --window.")
    with device_mode():
        try:
            perplexity(own, words)
        except ValueError as error:
            parser.error(str(error))


def perplexity(own: argparse.Namespace, words: Sequence[str]) -> None:
    """The figures of one checkpoint on one text."""
    other = read_scores(own.compare) if own.compare else None
    options = parse_for_evaluation(words, seq_length=own.window)
    tokens = read_tokens(options, own.text)
    windows = sliding_windows(
        len(tokens),
        window=own.window,
        stride=own.window if own.stride is None else own.stride,
        max_windows=own.max_windows,
    )
    stepper = open_stepper(options)
    scores = score_windows(options, stepper, tokens=tokens, windows=windows)
    if stepper.layout.is_writer:
        report(scores, other=other)
        if own.tokens_out:
            scores.save(own.tokens_out)
    close_layout()


def report(scores: TokenScores, *, other: TokenScores | None) -> None:
    """Print the figures."""
    mean = mean_nll(scores)
    value, error = mean.value, mean.standard_error
    print(f"tokens       {mean.num_tokens} in {mean.num_windows} windows")
    print(f"nll          {value:.5f} +- {error:.5f} nats per token")
    print(f"perplexity   {math.exp(value):.4f} +- {math.exp(value) * error:.4f}")
    if other is not None:
        difference = paired_difference(scores, other)
        value, error = difference.value, difference.standard_error
        print(f"this - other {value:+.5f} +- {error:.5f} nats per token, paired")


if __name__ == "__main__":
    quiet_libraries()
    sys.exit(main())
