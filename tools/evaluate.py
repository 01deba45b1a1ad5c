"""What a checkpoint is worth: on text, and on tasks.

    python tools/evaluate.py perplexity --hf-model DIR --text FILE
    torchrun --nproc-per-node 2 tools/evaluate.py perplexity --hf-model DIR --text FILE \\
        --tensor-model-parallel-size 2 --tokens-out now.npz --compare before.npz
    torchrun --nproc-per-node 2 tools/evaluate.py tasks --hf-model DIR --tasks gsm8k:test.jsonl \\
        --tasks-as-chat --num-tasks 100 --samples 4 --k 1 4 --output result.json

All other options are those of pretrain_rl.py: the layout, --bf16, --load with its architecture,
sampling (--rollout-...), tasks, environments and verifiers.
"""

from __future__ import annotations

import sys

from megatron_ext.options.first_look import look_first

if __name__ == "__main__":
    # before the imports below, which take seconds
    look_first(sys.argv[1:], tool="evaluate.py", files=("--text", "--compare"))

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ext.evaluation.perplexity import (
    TokenScores,
    mean_nll,
    paired_difference,
    read_scores,
    sliding_windows,
)
from megatron_ext.evaluation.transcripts import TranscriptFile, transcript
from megatron_ext.options.ranges import in_range
from megatron_ext.report.whole_file import check_writable, whole_file
from megatron_ext.upstream.command_line import JobParser
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.evaluate import (
    open_stepper,
    parse_for_evaluation,
    read_tokens,
    score_windows,
)
from megatron_ext.upstream.evaluate_tasks import Played, Sampled, evaluate_tasks, parse_for_tasks
from megatron_ext.upstream.layout import close_layout
from pretrain_rl import quiet_libraries

SEED = in_range(int, at_least=-(2**63), at_most=2**63 - 1)
SEQ_LENGTH = {
    "perplexity": "--seq-length: the sequences here are the windows; use --window.",
    "tasks": "--seq-length: the longest sequence here is --max-context.",
}


def build_parser() -> JobParser:
    """Options of this tool."""
    parser = JobParser(
        description="Evaluate a checkpoint. Options not listed here are those of pretrain_rl.py.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    perplexity = commands.add_parser(
        "perplexity", help="negative log-likelihood per token of a text", allow_abbrev=False
    )
    perplexity.add_argument("--text", type=Path, required=True, help="UTF-8 text file")
    perplexity.add_argument(
        "--window",
        type=in_range(int, at_least=2),
        default=512,
        help="tokens the model sees at once (default 512)",
    )
    perplexity.add_argument(
        "--stride",
        type=in_range(int, at_least=1),
        help="tokens from one window's start to the next's; what two windows share is context of "
        "the second (default: the window, no overlap)",
    )
    perplexity.add_argument(
        "--max-windows", type=in_range(int, at_least=1), help="only the first windows (default all)"
    )
    perplexity.add_argument("--tokens-out", type=Path, help="npz file for the NLL of every token")
    perplexity.add_argument(
        "--compare", type=Path, help="--tokens-out of another checkpoint: paired difference"
    )
    add_tasks(commands.add_parser("tasks", help="pass@k on tasks", allow_abbrev=False))
    return parser


def add_tasks(parser: argparse.ArgumentParser) -> None:
    """Options of the command tasks."""
    parser.add_argument(
        "--num-tasks",
        type=in_range(int, at_least=1),
        help="the first so many tasks: of --eval-tasks, or of the file that --tasks names, or held "
        "out (default: all of a file, else 200)",
    )
    parser.add_argument(
        "--samples", type=in_range(int, at_least=1), default=1, help="of each task (default 1)"
    )
    parser.add_argument(
        "--k",
        type=in_range(int, at_least=1),
        nargs="+",
        default=[1],
        help="pass@k for these, each at most --samples (default 1)",
    )
    parser.add_argument("--sampling-seed", type=SEED, default=0, help="same seed, same tokens")
    parser.add_argument(
        "--max-context",
        type=in_range(int, at_least=2),
        help="tokens of an episode, prompt and all (default 2048, or what the checkpoint can; 160 "
        "of --tasks arithmetic)",
    )
    parser.add_argument(
        "--group-by",
        nargs="*",
        default=["family"],
        help="metadata of the tasks whose values get a pass@1 of their own (default family)",
    )
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    parser.add_argument("--transcripts", type=Path, help="JSONL file for the episodes")
    parser.add_argument(
        "--transcripts-mb",
        type=in_range(int, at_least=0),
        default=100,
        help="its size at most (default 100 MB)",
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate, print the figures and write the files; every rank calls it."""
    parser = build_parser()
    own, words = parser.parse_known_args(argv)
    if any(word.split("=")[0] == "--seq-length" for word in words):
        parser.error(SEQ_LENGTH[own.command])
    with device_mode():
        try:
            (perplexity if own.command == "perplexity" else tasks)(own, words)
        except (OSError, ValueError) as error:
            parser.error(str(error))


def perplexity(own: argparse.Namespace, words: Sequence[str]) -> None:
    """The figures of one checkpoint on one text."""
    other = read_scores(own.compare) if own.compare else None
    if own.tokens_out:
        check_writable(own.tokens_out, flag="--tokens-out")
    options = parse_for_evaluation(words, seq_length=own.window, length_flag="--window")
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
            with whole_file(own.tokens_out) as partial:
                scores.save(partial)
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


def tasks(own: argparse.Namespace, words: Sequence[str]) -> None:
    """The pass rates of one checkpoint on tasks."""
    for flag in ("output", "transcripts"):
        if path := getattr(own, flag):
            check_writable(path, flag=f"--{flag}")
    if not all(1 <= k <= own.samples for k in own.k):
        raise ValueError(f"--k {own.k}: each must be from 1 to --samples {own.samples}.")
    options = parse_for_tasks(words, max_context=own.max_context)
    sampled = Sampled(
        num_tasks=own.num_tasks,
        samples=own.samples,
        seed=own.sampling_seed,
        ks=sorted(set(own.k)),
        group_by=own.group_by,
    )
    played = evaluate_tasks(options, sampled)
    if played.layout.is_writer:
        settings = {
            "checkpoint": options.megatron.load or options.megatron.hf_model,
            "tasks": options.environments.eval_tasks or options.environments.tasks,
            "samples": own.samples,
            "sampling_seed": own.sampling_seed,
            "sampling": vars(options.rollout.sampling),
            "max_new_tokens": options.rollout.rollout_max_new_tokens,
            "max_context": options.megatron.seq_length,
        }
        report_tasks(played, settings=settings)
        if own.transcripts:
            write_transcripts(own.transcripts, played, max_bytes=own.transcripts_mb * 10**6)
        if own.output:
            record = {**settings, **played.evaluation.as_record(), "seconds": played.seconds}
            with whole_file(own.output) as partial:
                partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    close_layout()


def report_tasks(played: Played, *, settings: dict[str, Any]) -> None:
    """Print the figures."""
    found, seconds = played.evaluation, played.seconds
    print(f"tasks        {found.num_tasks} of {settings['tasks']}, {settings['samples']} each")
    print(
        f"episodes     {found.num_episodes}, {found.num_truncated} of them truncated; "
        f"{found.num_failed} more failed"
    )
    for k, rate in found.pass_at.items():
        print(f"pass@{k:<7} {rate} (95 % confidence)")
    for name, rate in found.groups.items():
        print(f"{name:12} {rate}")
    print(f"mean reward  {found.mean_reward:.4f}")
    print(f"sampled      {found.num_sampled} tokens, {found.num_sampled / seconds:.1f} tokens/s")


def write_transcripts(path: Path, played: Played, *, max_bytes: int) -> None:
    """One episode a line, as many as fit."""
    with whole_file(path) as partial:
        file = TranscriptFile(partial, max_bytes=max_bytes)
        for episode in played.episodes:
            file.add(transcript(episode, decode=played.decode))
        partial.touch()
    if file.num_left_out:
        print(f"{path}: {file.num_left_out} episodes left out, see --transcripts-mb")


if __name__ == "__main__":
    quiet_libraries()
    sys.exit(main())
