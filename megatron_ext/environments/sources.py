"""Tasks by the name that --tasks gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_ext.environments.arithmetic import ArithmeticSource
from megatron_ext.environments.base import Task, TaskSource
from megatron_ext.environments.config import EnvironmentConfig
from megatron_ext.environments.datasets import JsonlSource, TextTask, read_tasks
from megatron_ext.environments.gsm8k import read_gsm8k
from megatron_ext.environments.reasoning_gym import ReasoningGymSource
from megatron_ext.environments.text import TextCodec
from megatron_ext.rewards.verifiers import Verifiers

GSM8K = "gsm8k:"
"""Before the path of a file in GSM8K's own format."""
NUM_EVALUATED = 200
"""Tasks of a source without an end that are evaluated unless told."""


def open_source(
    config: EnvironmentConfig, *, codec: TextCodec | None, verify: Verifiers
) -> TaskSource:
    """The tasks of --tasks and --eval-tasks.

    codec: of the model's tokenizer; the arithmetic tasks have their own and need none.

    Raises:
        ValueError: a file is missing or malformed, a data set unknown, or a tokenizer missing.
    """
    if config.tasks == "arithmetic":
        return ArithmeticSource(seed=config.task_seed)
    if codec is None:
        raise ValueError(f"--tasks {config.tasks} are texts: name a tokenizer for them.")
    source = _open_texts(config, codec=codec, verify=verify)
    codec.encode(source.train(0).prompt)  # what can never be encoded is said now
    return source


def _open_texts(
    config: EnvironmentConfig, *, codec: TextCodec, verify: Verifiers
) -> JsonlSource | ReasoningGymSource:
    if not config.is_file:
        return ReasoningGymSource(
            config.tasks.removeprefix("reasoning-gym:"),
            codec=codec,
            seed=config.task_seed,
            as_chat=config.tasks_as_chat,
        )
    for flag, name in (("--tasks", config.tasks), ("--eval-tasks", config.eval_tasks)):
        if name is not None and not Path(name.removeprefix(GSM8K)).is_file():
            others = ", arithmetic or reasoning-gym:NAME" if flag == "--tasks" else ""
            raise ValueError(f"{flag} {name} is no file: give a JSONL file, gsm8k:FILE{others}.")
    return JsonlSource(
        read_file(config.tasks),
        held_out=[] if config.eval_tasks is None else read_file(config.eval_tasks),
        codec=codec,
        verify=verify,
        seed=config.task_seed,
    )


def read_file(name: str) -> list[TextTask]:
    """The tasks of a JSONL file, or of `gsm8k:FILE`; raises `ValueError` as `read_tasks`."""
    if name.startswith(GSM8K):
        return read_gsm8k(name.removeprefix(GSM8K))
    return read_tasks(name)


def open_evaluation(
    config: EnvironmentConfig,
    *,
    codec: TextCodec | None,
    verify: Verifiers,
    count: int | None = None,
) -> tuple[TaskSource, Sequence[Task]]:
    """A source, and the tasks to evaluate a policy on: held-out ones, or those of the file named.

    count: None = all of a file, 200 of a source without an end.

    Raises:
        ValueError: as `open_source`, or there are fewer tasks.
    """
    if config.is_file and config.eval_tasks is None:
        config = replace(config, eval_tasks=config.tasks)
    source = open_source(config, codec=codec, verify=verify)
    most = source.num_held_out if isinstance(source, JsonlSource) else None
    wanted = (most or NUM_EVALUATED) if count is None else count
    if wanted < 1 or (most is not None and wanted > most):
        there = "" if most is None else f" of the {most} in {config.eval_tasks}"
        raise ValueError(f"--num-tasks {count}{there}: ask for at least 1, and for no more.")
    return source, source.held_out(wanted)
