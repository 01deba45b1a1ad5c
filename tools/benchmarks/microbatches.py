"""`microbatches`: packed dynamic allocation against a fixed count and a padded token budget.

Lengths are seed 000's 512 agent trajectories, divided by --scale, in random order.  An update has
--global-batch-size of them: one replica's share, by default that of 512 over 32 replicas.  The more
sequences an update has, the better padding can be sorted away, and the less is left for packing to
gain; `padding_by_update` has that share for other sizes.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial

from megatron_ext.packing import padding_share, token_budget_batches
from tools.benchmarks.lengths import AGENT_BUDGET, LONGEST_AGENT, agent_lengths
from tools.benchmarks.side_by_side import seconds_of
from tools.benchmarks.tiny_training import add_model_arguments, random_samples, tiny_training

FIXED, BUDGET, PACKED = "fixed count, padded", "token budget, padded", "token budget, packed"


def add_arguments(parser: ArgumentParser) -> None:
    """Options of the subcommand."""
    add_model_arguments(parser)
    parser.add_argument("--scale", type=int, default=128)
    parser.add_argument("--global-batch-size", type=int, default=16)
    parser.add_argument("--micro-batch-size", type=int, default=8)


def run(options: Namespace) -> dict[str, object]:
    """Real tokens a second of the three, and packed relative to the better padded one."""
    drawn, order = agent_lengths()
    lengths = [max(drawn[i] // options.scale, 1) for i in order]
    samples = random_samples(lengths, vocab_size=options.vocab_size)
    budget = AGENT_BUDGET // options.scale
    settings = {
        FIXED: {"micro_batch_size": options.micro_batch_size},
        BUDGET: {"max_tokens_per_microbatch": budget},
        PACKED: {"packing": True, "max_tokens_per_microbatch": budget},
    }
    with tiny_training(options, seq_length=LONGEST_AGENT // options.scale) as training:
        plans = {
            name: [
                training.plan(update, **setting)
                for update in in_updates(samples, options.global_batch_size)
            ]
            for name, setting in settings.items()
        }
        seconds = seconds_of(
            {name: [partial(training.train, p) for p in ps] for name, ps in plans.items()}
        )
    speed = {name: sum(lengths) / value for name, value in seconds.items()}
    positions = {name: sum(p.num_positions for p in ps) for name, ps in plans.items()}
    return {
        "tokens": sum(lengths),
        "updates": len(plans[PACKED]),
        "microbatches": {n: sum(len(p.microbatches) for p in ps) for n, ps in plans.items()},
        "padding_share": {name: 1 - sum(lengths) / value for name, value in positions.items()},
        "padding_by_update": {
            str(size): padding_of_budget(lengths, size=size, budget=budget)
            for size in (8, 16, 32, 64, 128, 512)
        },
        "tokens_per_second": speed,
        "ratio": speed[PACKED] / max(speed[FIXED], speed[BUDGET]),
    }


def in_updates[T](values: Sequence[T], size: int) -> list[Sequence[T]]:
    """The values, `size` at a time."""
    return [values[i : i + size] for i in range(0, len(values), size)]


def padding_of_budget(lengths: Sequence[int], *, size: int, budget: int) -> float:
    """Share of padding of padded token-budget microbatches, `size` sequences an update."""
    shares = [
        (sum(part), padding_share(part, token_budget_batches(part, budget)))
        for part in in_updates(lengths, size)
    ]
    return 1 - sum(lengths) / sum(tokens / (1 - share) for tokens, share in shares)
