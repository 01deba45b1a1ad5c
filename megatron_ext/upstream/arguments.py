"""Configs -> flags -> configs: every option of ours beside Megatron's, parsed and checked together.

Each room declares its options once, in a frozen dataclass; Megatron's ``ArgumentGroupFactory``
turns the fields into flags.  After parsing, rooms get their config and Megatron gets its own
namespace, which nobody of ours changes any more.
Invariant the tests check: whatever the words, ``parse`` returns or ends in status 2 with every
mismatch in one message.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from math import lcm
from pathlib import Path
from typing import Any

from megatron.training.argument_utils import ArgumentGroupFactory
from megatron.training.arguments import add_megatron_arguments

from megatron_ext.data.config import DEMONSTRATIONS, DataConfig
from megatron_ext.environments.arithmetic_tasks import TOKENIZER
from megatron_ext.environments.config import EnvironmentConfig
from megatron_ext.logprobs.config import LogProbsConfig
from megatron_ext.options.job_parser import PROGRAM, USAGE
from megatron_ext.options.megatron_ranges import MEGATRON_RANGES
from megatron_ext.options.ranges import BadOptions, ranges_of
from megatron_ext.packing.config import PackingConfig
from megatron_ext.parallel.config import ParallelConfig
from megatron_ext.report.config import ReportConfig
from megatron_ext.rewards.config import RewardConfig
from megatron_ext.rl.config import AlgorithmConfig
from megatron_ext.rl.loop_config import LoopConfig
from megatron_ext.rl.presets import overridden, preset_defaults
from megatron_ext.rollout.config import RolloutConfig
from megatron_ext.upstream.command_line import CommandLine, GivenFlag
from megatron_ext.upstream.config import CheckpointConfig, LatentConfig
from megatron_ext.upstream.hf_source import checked_values, described
from megatron_ext.upstream.machine import Machine, machine_defaults, this_machine
from megatron_ext.upstream.megatron_checks import megatron_problems
from megatron_ext.upstream.validation import problems, required
from megatron_ext.upstream.validation_ranges import check_ranges
from megatron_ext.upstream.validation_support import idle_flags
from megatron_ext.upstream.validation_training import BYTE_VOCABULARY

logger = logging.getLogger(__name__)

CONFIGS = {
    "algorithm": AlgorithmConfig,
    "loop": LoopConfig,
    "environments": EnvironmentConfig,
    "rewards": RewardConfig,
    "rollout": RolloutConfig,
    "data": DataConfig,
    "packing": PackingConfig,
    "logprobs": LogProbsConfig,
    "parallel": ParallelConfig,
    "latent": LatentConfig,
    "checkpoint": CheckpointConfig,
    "report": ReportConfig,
}
"""Our option groups, in the order ``--help`` shows them."""
SAVE_INTERVAL_MINUTES = 10.0
"""What a killed run loses at most where no --save-interval was chosen."""
RANGES = MEGATRON_RANGES | {n: r for c in CONFIGS.values() for n, r in ranges_of(c).items()}
"""What every number may be, Megatron's and ours, by the name of the parsed value."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Everything a run was told: Megatron's namespace (read only) and one config per room."""

    megatron: argparse.Namespace
    algorithm: AlgorithmConfig
    loop: LoopConfig
    environments: EnvironmentConfig
    rewards: RewardConfig
    rollout: RolloutConfig
    data: DataConfig
    packing: PackingConfig
    logprobs: LogProbsConfig
    parallel: ParallelConfig
    latent: LatentConfig
    checkpoint: CheckpointConfig
    report: ReportConfig

    @property
    def training_temperature(self) -> float:
        """Temperature of the trained log-probabilities: the sampler's where a sampler was."""
        is_supervised = self.algorithm.algorithm == "sft"
        return 1.0 if is_supervised else self.rollout.rollout_temperature

    def as_record(self) -> dict[str, object]:
        """Every option and its value, ours included, for the run's record; `changed_preset` says
        in which of them --algorithm was overruled."""
        values = {name: value for name, value in vars(self.megatron).items() if name[0] != "_"}
        changed = overridden(self.algorithm.algorithm, values)
        return values | ({"changed_preset": changed} if changed else {})


@cache
def build_parser(machine: Machine | None = None) -> CommandLine:
    """Megatron's parser with our option groups, and the defaults of a machine (None = this one)."""
    parser = CommandLine(
        prog=PROGRAM,
        usage=USAGE,
        description="Reinforcement-learning post-training on Megatron-Core. Options of "
        "megatron-ext come first in their own groups ('megatron-ext: ...'), then Megatron's.",
    )
    for name, config in CONFIGS.items():
        ArgumentGroupFactory(config).build_group(parser, title=f"megatron-ext: {name}")
    add_megatron_arguments(parser)
    parser.set_defaults(**machine_defaults(machine or this_machine()))
    parser.show_ranges(RANGES)
    return parser


def parse(argv: Sequence[str] | None = None) -> Options:
    """`read_options`; prints all mismatches in one message and exits with status 2."""
    try:
        return read_options(sys.argv[1:] if argv is None else argv)
    except BadOptions as error:
        build_parser().refuse(error.problems)


def read_options(words: Sequence[str]) -> Options:
    """Parse and check a command line; Megatron's globals are set to it.

    Raises:
        BadOptions: every mismatch, a sentence each.
    """
    parser = build_parser()
    parsed, bad_values, unknown = parser.read(words)
    if bad_values:
        raise BadOptions(bad_values + unknown)
    args = copy.deepcopy(parsed)  # defaults that are lists belong to the parser
    args.rank = int(os.environ.get("RANK", "0"))
    args.world_size = int(os.environ.get("WORLD_SIZE", "1"))
    args._is_global_batch_size_explicitly_specified = args.global_batch_size is not None
    given = parser.given(words)
    _take_from_preset(args, given)
    if args.save_interval_minutes is None:
        is_needed = args.save is not None and args.save_interval is None
        args.save_interval_minutes = SAVE_INTERVAL_MINUTES if is_needed else 0.0
    of_checkpoint = _take_from_checkpoint(args, given)
    configs, wrong = check(args, given=given, machine=this_machine())
    wrong += of_checkpoint + unknown
    if of_checkpoint and not args.hf_model:  # what is missing follows from it
        wrong = [problem for problem in wrong if problem not in required(args)]
    if not wrong:
        _fill_in(args)
        wrong += megatron_problems(args, parser)
    if wrong:
        raise BadOptions(wrong)
    idle = idle_flags(given)
    if idle and args.rank == 0:
        logger.warning("of Megatron's own training loop, no effect here: %s", ", ".join(idle))
    return Options(megatron=args, **configs)


def check(
    args: argparse.Namespace, *, given: Sequence[GivenFlag], machine: Machine
) -> tuple[dict[str, Any], list[str]]:
    """The configs of our rooms, and every mismatch that Megatron need not be asked for."""
    ranges = check_ranges(args, RANGES)
    configs, wrong = _configs(ranges.legal)
    wrong += problems(ranges.legal, configs, given=given, machine=machine)
    return configs, ranges.problems + ranges.without_followers(wrong)


def _take_from_preset(args: argparse.Namespace, given: Any) -> None:
    """Give the options of --algorithm's preset that were not named the preset's values."""
    names = {flag.name for flag in given}
    for name, value in preset_defaults(args.algorithm).items():
        if name not in names:
            setattr(args, name, value)
    if args.algorithm != "sft" and args.loss_normalization == "constant":
        args.loss_normalization_max_length = (
            args.loss_normalization_max_length or args.rollout_max_new_tokens
        )


def _take_from_checkpoint(args: argparse.Namespace, given: Any) -> list[str]:
    """Set the flags that --hf-model or --load fixes; what speaks against it, as sentences."""
    if args.hf_model and not Path(args.hf_model).exists():  # `problems` says what is missing
        return []
    try:
        found = described(args)
        values = checked_values(args, given, found)
    except ValueError as error:
        text = str(error)
        is_bare = args.hf_model and text.startswith(args.hf_model)
        return [f"--hf-model {text}" if is_bare else text]
    for name, value in values.items():
        setattr(args, name, value)
    for checkpoint in found if args.rank == 0 else ():
        for note in checkpoint.notes:
            _say_once(f"{checkpoint.flag}: {note}")
    return []


@cache
def _say_once(text: str) -> None:
    logger.warning("%s", text)


def _configs(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The configs of our rooms, and what is wrong with those that refuse their values."""
    configs: dict[str, Any] = {}
    wrong: list[str] = []
    for name, config in CONFIGS.items():
        try:
            configs[name] = config(**{f.name: getattr(args, f.name) for f in fields(config)})
        except BadOptions as error:
            wrong += error.problems
        except ValueError as error:
            wrong.append(str(error))
    return configs, wrong


def _fill_in(args: argparse.Namespace) -> None:
    """Values that follow from others.

    The padded vocabulary is the same for every power of two of tensor-parallel ranks, so that
    checkpoints fit all those layouts.  Without --save-interval the last step is saved, and others
    by the clock (--save-interval-minutes).
    """
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    if args.vocab_size is None:
        args.vocab_size = TOKENIZER.size if _is_arithmetic(args) else BYTE_VOCABULARY
    if args.padded_vocab_size is None:
        multiple = lcm(args.make_vocab_size_divisible_by, args.tensor_model_parallel_size)
        args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple
    if args.save is not None and args.save_interval is None:
        args.save_interval = args.train_iters


def _is_arithmetic(args: argparse.Namespace) -> bool:
    """Whether the run's tokens are those of the built-in tasks."""
    data = args.train_data if args.algorithm == "sft" else args.tasks
    return data in ("arithmetic", DEMONSTRATIONS)
