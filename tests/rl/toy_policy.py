"""A policy for the loop that samples with random weights and writes down what it is asked to do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_ext.environments.base import Environment, EpisodeLimits, Observation
from megatron_ext.environments.calls import TimedCalls
from megatron_ext.environments.runner import EpisodeRunner
from megatron_ext.packing.config import PackingConfig
from megatron_ext.packing.plan import ReplicaLayout, plan_step
from megatron_ext.packing.types import Microbatch
from megatron_ext.rl.config import AlgorithmConfig
from megatron_ext.rl.learning import Planner
from megatron_ext.rl.loop import ReinforcementLoop
from megatron_ext.rl.loop_config import LoopConfig
from megatron_ext.rl.objective import PolicyObjective
from megatron_ext.rl.policy import Update
from megatron_ext.rl.transcripts import Transcripts
from megatron_ext.rl.types import ADVANTAGES
from megatron_ext.rl.watch import Watch
from megatron_ext.rollout.config import RolloutConfig
from megatron_ext.rollout.engine import RolloutEngine
from tests.rollout.toy_model import ToyDecoder

CONTEXT = 40


class ToyPolicy:
    """One replica; never learns."""

    dp_size, dp_rank, is_writer = 1, 0, True

    def __init__(self) -> None:
        self.engine = RolloutEngine(ToyDecoder(max_context=CONTEXT), RolloutConfig())
        self.trained: list[list[Microbatch]] = []
        self.calls: list[str] = []
        self.moved = 0

    def gather[Item](self, mine: Sequence[Item]) -> list[Item]:
        return list(mine)

    def logprobs(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        self.calls.append("logprobs")
        return [torch.full(m.weights_BS.shape, -3.0) for m in microbatches]

    def reference_logprobs(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        self.calls.append("reference")
        return [torch.full(m.weights_BS.shape, -3.5) for m in microbatches]

    def total(self, values: Tensor) -> Tensor:
        return values

    def train(
        self, microbatches: Sequence[Microbatch], objective: PolicyObjective, *, num_samples: int
    ) -> Update:
        self.calls.append("train")
        self.trained.append(list(microbatches))
        self.moved += num_samples
        for microbatch in microbatches:  # what nothing reads is not copied to the device
            assert set(microbatch.extras) == set(objective.extras)
        return Update(
            loss=0.0,
            statistics=statistics_of(microbatches, objective),
            num_trained=sum(int((m.weights_BS != 0).sum()) for m in microbatches),
            num_positions=sum(m.num_positions for m in microbatches),
            grad_norm=0.0,
            learning_rate=0.0,
            skipped=False,
        )

    def skip(self, *, num_samples: int) -> None:
        self.calls.append("skip")
        self.moved += num_samples

    def advantages(self) -> list[float]:
        """The different advantages that were trained."""
        rows = [m for some in self.trained for m in some]
        return sorted({x for m in rows for x in m.extras[ADVANTAGES][m.weights_BS != 0].tolist()})


def statistics_of(microbatches: list[Microbatch], objective: PolicyObjective) -> dict[str, float]:
    """Means over the trained tokens, of log-probs that are all -3."""
    sums, count = dict.fromkeys(objective.statistics, 0.0), 0
    for microbatch in microbatches:
        logprobs_BS = torch.full(microbatch.weights_BS.shape, -3.0)
        terms = objective(logprobs_BS, microbatch, entropy_BS=-logprobs_BS)
        is_trained_BS = microbatch.weights_BS != 0
        count += int(is_trained_BS.sum())
        for name, values_BS in terms.statistics.items():
            sums[name] += float(values_BS[is_trained_BS].sum())
    return {name: total / max(count, 1) for name, total in sums.items()}


class OneTask:
    """Named by its place."""

    metadata: dict = {}  # noqa: RUF012  (the protocol's field, empty)

    def __init__(self, place: int) -> None:
        self.id = str(place)


class OddTokens:
    """One turn of up to four tokens; earns 1 if the first of them is odd."""

    is_instant = True
    stop_ids = frozenset({0})

    def reset(self, task: OneTask, *, seed: int) -> list[int]:
        return [1, 2, 1 + int(task.id) % 7]

    def step(self, sampled: Sequence[int]) -> Observation:
        return Observation(reward=float(sampled[0] % 2), done=True)


class Source:
    """Endless places."""

    def __init__(self, environment: type[Environment]) -> None:
        self.environment = environment

    def train(self, position: int) -> OneTask:
        return OneTask(position)

    def held_out(self, count: int) -> list[OneTask]:
        return [OneTask(1000 + i) for i in range(count)]


def loop_of(
    policy: ToyPolicy,
    *,
    environment: type[Environment] = OddTokens,
    algorithm: AlgorithmConfig | None = None,
    time_limit: float = 5.0,
    **config: object,
) -> ReinforcementLoop:
    """A loop of 16 episodes a step in groups of 4."""
    algorithm = algorithm or AlgorithmConfig(algorithm="grpo-plus")
    packing = PackingConfig(packing=True)

    def plan(samples, size=None):
        return plan_step(
            samples,
            packing,
            replica=ReplicaLayout(),
            seq_length=CONTEXT,
            micro_batch_size=1,
            global_batch_size=size,
        )

    return ReinforcementLoop(
        policy=policy,
        source=Source(environment),
        runner=EpisodeRunner(
            environment,
            limits=EpisodeLimits(max_new_tokens=4, max_context=CONTEXT),
            timed_calls=TimedCalls(workers=2, time_limit=time_limit),
        ),
        evaluator=None,
        algorithm=algorithm,
        config=LoopConfig(group_size=4, **config),
        planner=Planner(for_training=plan, for_scoring=plan),
        watch=Watch(algorithm, is_half=False, is_writer=True),
        transcripts=Transcripts(
            None, decode=str, per_step=1, max_bytes=0, resume_step=None, is_writer=True
        ),
        batch_size=16,
        max_response_tokens=4,
        seed=0,
    )
