"""What an environment gives, checked and turned into plain values: prompts, answers, rewards.

All of it happens inside the call, so a wrong value costs its own episode, with the reason, and no
later code meets an object of an environment.
Invariant the tests check: ids are ints of the vocabulary, rewards finite floats.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from megatron_ext.environments.base import Environment, EpisodeStart, Observation

REWARD_LIMIT = 1e12
"""Largest reward, either way: far beyond, losses in float32 overflow."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """How an episode begins."""

    ids: list[int]
    stop_ids: frozenset[int]
    """Token ids that end a turn of the policy."""


def prompt_of(environment: Environment, start: EpisodeStart, *, vocab_size: int) -> Prompt:
    """Reset an environment.

    Raises:
        ValueError, TypeError: it gave no prompt, or something else.
    """
    given = environment.reset(start.task, seed=start.seed)
    ids = _token_ids(given, what="the prompt", vocab_size=vocab_size)
    if not ids:
        raise ValueError("the environment gave an empty prompt")
    stop_ids = frozenset(operator.index(token) for token in environment.stop_ids)
    return Prompt(ids=ids, stop_ids=stop_ids)


def answer_of(
    environment: Environment, sampled: tuple[int, ...], *, vocab_size: int
) -> Observation:
    """The environment's answer to a turn.

    Raises:
        ValueError, TypeError: it is no `Observation`, or one with values that cannot be used.
    """
    given = environment.step(sampled)
    if not isinstance(given, Observation):
        raise TypeError(f"the environment answered {type(given).__name__}, no Observation")
    if given.done not in (True, False):
        raise TypeError(f"the environment said done={given.done!r}, neither True nor False")
    return Observation(
        ids=_token_ids(given.ids, what="the answer", vocab_size=vocab_size),
        reward=_reward(given.reward),
        done=bool(given.done),
        warning=None if given.warning is None else str(given.warning),
    )


def _reward(given: Any) -> float:
    is_number = hasattr(given, "__float__") or hasattr(given, "__index__")
    reward = float(given) if is_number else math.nan
    if not -REWARD_LIMIT <= reward <= REWARD_LIMIT:
        raise ValueError(
            f"the environment gave the reward {given!r:.100}, which is no number from "
            f"-{REWARD_LIMIT:g} to {REWARD_LIMIT:g}"
        )
    return reward


def _token_ids(given: Any, *, what: str, vocab_size: int) -> list[int]:
    """The ids as ints; numpy's and torch's integers are welcome."""
    if not isinstance(given, Collection) or isinstance(given, str | bytes | dict | set | frozenset):
        raise TypeError(
            f"the environment gave {what} as {type(given).__name__}, not as a list of token ids"
        )
    ids: list[int] = []
    wrong: list[str] = []
    for token in given:
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            wrong.append(f"{token!r:.40}")
        else:
            ids.append(operator.index(token))
    if wrong:
        raise TypeError(
            f"the environment gave {what} with {', '.join(wrong[:5])}, which are no token ids"
        )
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(
            f"the environment gave {what} with token ids {outside[:5]}, which are not in the "
            f"vocabulary of {vocab_size}"
        )
    return ids
