"""Steps of our reinforcement-learning loop whose episodes have the lengths they are told.

The loop, the learner and the runner are those of `pretrain_rl.py`; two parts are replaced: a
runner that tells the engine how many tokens each episode gets, and an environment whose reward is a
function of the sampled ids, so that groups are mixed.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from shlex import split
from typing import Any

from megatron_ext.environments.base import (
    Environment,
    EpisodeStart,
    Observation,
    TokenGenerator,
)
from megatron_ext.environments.episode import Episode
from megatron_ext.environments.runner import EpisodeRunner
from megatron_ext.report.gaps import Gaps
from megatron_ext.rewards.verifiers import Verifiers
from megatron_ext.rl.loop import ReinforcementLoop
from megatron_ext.rl.stop import NeverStops
from megatron_ext.rollout.types import Completion, Request
from megatron_ext.upstream.arguments import parse
from megatron_ext.upstream.checkpoint import Progress
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.layout import close_layout, open_layout
from megatron_ext.upstream.learner import MegatronLearner
from megatron_ext.upstream.rl_run import episode_limits, open_loop, tasks_id
from pretrain_rl import open_model, quiet_libraries

REWARDS = 11
"""Different rewards: from the sum of the ids, modulo this; as on TRL's side."""
MOST_PROMPT_TOKENS = 64


class OurSteps:
    """Runs one step after the other."""

    def __init__(self, loop: ReinforcementLoop, runner: FixedLengthRunner) -> None:
        self._loop, self._runner = loop, runner
        self._number = 0

    def step(self, lengths: Sequence[int]) -> dict[str, float]:
        """The metrics of a step whose episodes have these numbers of sampled tokens."""
        self._runner.lengths = lengths
        consumed = self._number * self._loop.batch_size
        self._number += 1
        started = time.process_time()
        found = self._loop.step(self._number, consumed=consumed)
        return found | {"cpu_seconds": time.process_time() - started}


class FixedLengthRunner(EpisodeRunner):
    """Plays episodes that sample as many tokens as they are told, whatever these are."""

    lengths: Sequence[int] = ()
    """Of the next run's episodes, in the order of its starts."""

    def run(
        self,
        generator: TokenGenerator,
        starts: Sequence[EpisodeStart],
        *,
        on_episode: Callable[[Episode], None] | None = None,
    ) -> list[Episode]:
        """One episode for every start, in their order."""
        wanted = {
            (start.seed, start.sample): length
            for start, length in zip(starts, self.lengths, strict=True)
        }
        return super().run(FixedLengths(generator, wanted), starts, on_episode=on_episode)


class FixedLengths:
    """A token generator that gives each request its number of tokens; nothing else ends it."""

    def __init__(self, generator: TokenGenerator, wanted: Mapping[tuple[int, int], int]) -> None:
        """wanted: (seed, sample) of a request -> tokens."""
        self._wanted = wanted
        self._generator = generator

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._generator.vocab_size

    def submit(self, request: Request, *, keep: bool = False) -> int:
        """Queue a sequence; its ticket."""
        length = self._wanted[request.seed, request.sample]
        fixed = replace(request, max_new_tokens=length, stop_ids=frozenset())
        return self._generator.submit(fixed, keep=keep)

    def extend(self, ticket: int, token_ids: Sequence[int], *, max_new_tokens: int) -> None:
        """Go on with a sequence; these never do."""
        self._generator.extend(ticket, token_ids, max_new_tokens=max_new_tokens)

    def release(self, ticket: int) -> None:
        """Forget a sequence."""
        self._generator.release(ticket)

    def step(self) -> Sequence[Completion]:
        """Sample the next token of the running sequences."""
        return self._generator.step()


class SumOfIds:
    """Asks as another environment does; any response earns a share given by the sum of its ids."""

    is_instant = True
    stop_ids = frozenset[int]()

    def __init__(self, asks: Environment) -> None:
        self._asks = asks

    def reset(self, task: Any, *, seed: int) -> Sequence[int]:
        """Ids of the prompt."""
        return self._asks.reset(task, seed=seed)

    def step(self, sampled: Sequence[int]) -> Observation:
        """The end."""
        return Observation(reward=sum(sampled) % REWARDS / (REWARDS - 1), done=True)


@contextmanager
def our_steps(
    options: Namespace, *, model: Path, prompts: Sequence[str], longest: int
) -> Iterator[OurSteps]:
    """The model of a Hugging Face folder and its loop, in a job of one process.

    longest: most tokens of a completion.
    """
    tasks = model.parent / "tasks.jsonl"
    lines = [{"prompt": p, "answer": "0", "verifier": "numeric"} for p in prompts]
    tasks.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    quiet_libraries()
    with device_mode():
        words = [
            *flags(options, num_prompts=len(prompts), longest=longest),
            *("--tasks", str(tasks), "--hf-model", str(model), "--tokenizer-model", str(model)),
        ]
        parsed = parse(words)
        layout = open_layout(parsed.megatron)
        stepper, _ = open_model(parsed, layout, samples_id=tasks_id(parsed))
        learner = MegatronLearner(parsed, stepper, is_new=True)
        with Verifiers(parsed.rewards) as verify:
            loop = open_loop(
                parsed, learner, verify=verify, start=Progress(), stop=NeverStops(), gaps=Gaps()
            )
            runner = FixedLengthRunner(
                lambda: SumOfIds(loop.source.environment()),
                limits=episode_limits(parsed),
                sampling=parsed.rollout.sampling,
            )
            yield OurSteps(replace(loop, runner=runner), runner)
        close_layout()


def flags(options: Namespace, *, num_prompts: int, longest: int) -> list[str]:
    """The command line of `pretrain_rl.py`, without the model and the tasks."""
    episodes = num_prompts * options.group_size
    return [
        *split("--algorithm grpo --kl-coefficient 0 --tokenizer-type HuggingFaceTokenizer"),
        *split("--packing --lr-decay-style constant --rollouts-per-step 0 --train-iters 1000"),
        *("--seq-length", str(longest + MOST_PROMPT_TOKENS), "--lr", str(options.lr)),
        *("--max-tokens-per-microbatch", str(options.max_tokens_per_microbatch)),
        *("--group-size", str(options.group_size), "--global-batch-size", str(episodes)),
        *("--rollout-max-new-tokens", str(longest), "--rollout-slots", str(episodes)),
    ]
