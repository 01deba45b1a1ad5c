"""`packing`: real tokens a second of packed against padded training on one small model.

Lengths are seed 000's 64 episodes (min 10, median 18, 90th percentile 79, max 149): padded to the
longest, 74 % of the positions hold nothing.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from functools import partial

from tools.benchmarks.lengths import episode_lengths
from tools.benchmarks.side_by_side import seconds_of
from tools.benchmarks.tiny_training import add_model_arguments, random_samples, tiny_training


def add_arguments(parser: ArgumentParser) -> None:
    """Options of the subcommand."""
    add_model_arguments(parser)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--max-tokens-per-microbatch", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)


def run(options: Namespace) -> dict[str, object]:
    """Real tokens a second of both, their ratio, and the share of padding."""
    lengths = episode_lengths(options.episodes)
    samples = random_samples(lengths, vocab_size=options.vocab_size)
    with tiny_training(options, seq_length=max(lengths)) as training:
        plans = {
            "padded": training.plan(samples, micro_batch_size=len(samples)),
            "packed": training.plan(
                samples,
                packing=True,
                max_tokens_per_microbatch=options.max_tokens_per_microbatch,
            ),
        }
        seconds = seconds_of(
            {name: [partial(training.train, plan)] * options.rounds for name, plan in plans.items()}
        )
    tokens = sum(lengths) * options.rounds
    speed = {name: tokens / value for name, value in seconds.items()}
    return {
        "tokens": sum(lengths),
        "positions": {name: plan.num_positions for name, plan in plans.items()},
        "padding_share": {name: 1 - sum(lengths) / p.num_positions for name, p in plans.items()},
        "tokens_per_second": speed,
        "ratio": speed["packed"] / speed["padded"],
    }
