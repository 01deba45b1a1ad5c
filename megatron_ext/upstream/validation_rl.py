"""Options of a reinforcement-learning run that do not fit together."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megatron_ext.data.config import DEMONSTRATIONS
from megatron_ext.environments.arithmetic_demonstrations import LONGEST_DEMONSTRATION

_NEEDED = ("algorithm", "loop", "environments", "rewards", "rollout", "packing")


def demonstration_problems(args: Namespace, configs: Mapping[str, Any]) -> list[str]:
    """Rows that are too short for the built-in demonstrations."""
    packing, length = configs.get("packing"), args.seq_length
    if args.train_data != DEMONSTRATIONS or not packing or packing.overlong != "error":
        return []
    if length is None or min(length, packing.row_capacity(seq_length=length)) >= (
        LONGEST_DEMONSTRATION
    ):
        return []
    flag = "seq-length" if length < LONGEST_DEMONSTRATION else "max-tokens-per-microbatch"
    short = length if flag == "seq-length" else packing.max_tokens_per_microbatch
    return [
        f"--{flag} {short} is shorter than the longest of the {DEMONSTRATIONS}, "
        f"{LONGEST_DEMONSTRATION} tokens: use so many or more, or --overlong truncate or drop."
    ]


def reinforcement_problems(args: Namespace, configs: Mapping[str, Any]) -> list[str]:
    """Every mismatch as one sentence with flag, value, relation and remedy."""
    if any(name not in configs for name in _NEEDED):  # refused for its own problems
        return []
    algorithm, loop, rollout = configs["algorithm"], configs["loop"], configs["rollout"]
    found = configs["environments"].problems()
    found += algorithm.problems(
        group_size=loop.group_size,
        temperature=rollout.rollout_temperature,
        updates_per_batch=loop.updates_per_batch,
        max_response_tokens=rollout.rollout_max_new_tokens,
        loss_normalization=configs["packing"].loss_normalization,
    )
    if algorithm.algorithm == "sft":
        return found
    found += loop.problems(global_batch_size=args.global_batch_size)
    found += _sampling_problems(args, rollout.sampling)
    data = configs.get("data")
    found += [
        f"--{name.replace('_', '-')} is of --algorithm sft; {algorithm.algorithm} trains on what "
        "it samples of --tasks. Drop it."
        for name in ("train_data", "valid_data")
        if data is not None and getattr(data, name) is not None
    ]
    tasks = configs["environments"]
    if loop.eval_every and tasks.is_file and tasks.eval_tasks is None:
        found.append(
            f"--eval-every {loop.eval_every} with --tasks {tasks.tasks} needs --eval-tasks: a file "
            "of held-out tasks."
        )
    return found


def _sampling_problems(args: Namespace, sampling: Any) -> list[str]:
    """What makes the sampler's distribution another one than the trainer's."""
    found = [
        f"--{name} {value} is for evaluation only: the trained log-probs are those of all tokens, "
        f"so ratios would be wrong. Leave it at {off}."
        for name, value, off in (
            ("rollout-top-k", sampling.top_k, 0),
            ("rollout-top-p", sampling.top_p, 1),
            ("rollout-min-p", sampling.min_p, 0),
        )
        if value != off
    ]
    return found + [
        f"--{name.replace('_', '-')} {value} trains another policy than the one that sampled, "
        "which drops nothing out. Use 0."
        for name in ("attention_dropout", "hidden_dropout")
        if (value := getattr(args, name))
    ]
