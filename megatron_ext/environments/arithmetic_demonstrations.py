"""Demonstrations of the built-in tasks, for a warm start that leaves something to learn.

Sums of digits are answered at once, rightly.  Other tasks are shown by an expert, call by call, or
(more often) carelessly: answered at once, with a number near the right one.  A policy warmed up on
these knows both ways, and reinforcement must teach it to take the first.
"""

from __future__ import annotations

import random
import re

from megatron_ext.environments.arithmetic import ArithmeticEnvironment
from megatron_ext.environments.arithmetic_tasks import (
    DEMONSTRATION_MIX,
    LONGEST_CHAIN,
    TOKENIZER,
    ArithmeticTask,
    Mix,
    draw_task,
)
from megatron_ext.environments.episode import Episode, EpisodeBuilder

CARELESS_SHARE = 0.6
"""Of the demonstrations that are not sums of digits."""
CARELESS_ERROR = 4
"""Largest distance of a careless answer from the right one."""
LONGEST_DEMONSTRATION = len("Q30?") + LONGEST_CHAIN * len("b+7b+7;=12;") + len("A12.")
"""Tokens of the longest one: an expert's, of the longest chain, whose totals have two digits."""

_TERM = re.compile(r"[a-p][-+*]\d+")
_RESULT = re.compile(r"=(-?\d+);")


def expert_turn(context: str) -> str:
    """What an expert says next after `Q...?` and whatever followed; a sum of digits it just knows.

    It calls the calculator for one term after the other and copies the last result.
    """
    prompt, _, dialogue = context.partition("?")
    terms, results = _TERM.findall(prompt), _RESULT.findall(dialogue)
    sum_of_digits = re.fullmatch(r"Q(\d)[a-p]\+(\d)", prompt)
    if sum_of_digits is not None:
        return f"A{int(sum_of_digits[1]) + int(sum_of_digits[2])}."
    return f"{terms[len(results)]};" if len(results) < len(terms) else f"A{results[-1]}."


def careless_turn(task: ArithmeticTask, rng: random.Random) -> str:
    """An answer near the right one, without a call."""
    return f"A{max(0, task.answer + rng.randint(-CARELESS_ERROR, CARELESS_ERROR))}."


def draw_demonstration(
    rng: random.Random, *, mix: Mix = DEMONSTRATION_MIX, careless_share: float = CARELESS_SHARE
) -> Episode:
    """A demonstrated episode of a random training task; what was demonstrated counts as sampled."""
    task = draw_task(rng, mix=mix)
    is_careless = task.family != "digits" and rng.random() < careless_share
    return demonstrate(task, answer=careless_turn(task, rng) if is_careless else None)


def demonstrate(task: ArithmeticTask, *, answer: str | None = None) -> Episode:
    """The episode of an expert, or of one who answers at once with `answer`."""
    environment = ArithmeticEnvironment()
    builder = EpisodeBuilder(environment.reset(task))
    while True:
        turn = answer or expert_turn(TOKENIZER.decode(builder.ids))
        builder.append_sampled(TOKENIZER.encode(turn))
        observation = environment.step(builder.ids[-len(turn) :])
        if observation.done:
            return builder.finish(
                task_id=task.id,
                reward=observation.reward,
                end_reason="done",
                metadata=task.metadata,
            )
        builder.append_given(observation.ids)
