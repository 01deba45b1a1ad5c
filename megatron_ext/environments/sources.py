"""Tasks by the name that --tasks gives them."""

from __future__ import annotations

from pathlib import Path

from megatron_ext.environments.arithmetic import ArithmeticSource
from megatron_ext.environments.base import TaskSource
from megatron_ext.environments.config import EnvironmentConfig
from megatron_ext.environments.datasets import JsonlSource, read_tasks
from megatron_ext.environments.reasoning_gym import ReasoningGymSource
from megatron_ext.environments.text import TextCodec
from megatron_ext.rewards.verifiers import Verifiers


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
    for flag, path in (("--tasks", config.tasks), ("--eval-tasks", config.eval_tasks)):
        if path is not None and not Path(path).is_file():
            others = ", arithmetic or reasoning-gym:NAME" if flag == "--tasks" else ""
            raise ValueError(f"{flag} {path} is no file: give a JSONL file{others}.")
    return JsonlSource(
        read_tasks(config.tasks),
        held_out=[] if config.eval_tasks is None else read_tasks(config.eval_tasks),
        codec=codec,
        verify=verify,
        seed=config.task_seed,
    )
