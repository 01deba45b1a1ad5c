"""From the episodes of a step to updated weights: score, pack, log-probs where needed, update.

Minibatches and their microbatches are laid out once, so every epoch computes the same rows; the
old policy's log-probs are computed on these rows before the first update and stay in them.
Every rank makes the same plan from the same episodes.
Invariants the tests check: one update on any layout gives the weights of a single process; where
nothing is left to train nothing is updated, and no rank waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_ext.environments.episode import Episode
from megatron_ext.packing.batch import Sample
from megatron_ext.packing.plan import StepPlan
from megatron_ext.packing.types import Microbatch
from megatron_ext.rl.config import AlgorithmConfig
from megatron_ext.rl.kl import kl_estimate
from megatron_ext.rl.loop_config import LoopConfig
from megatron_ext.rl.objective import PolicyObjective
from megatron_ext.rl.phases import Phases
from megatron_ext.rl.policy import Policy, Update
from megatron_ext.rl.scoring import Scored, score_episodes
from megatron_ext.rl.stop import StepDropped, Stop
from megatron_ext.rl.types import OLD_LOGPROBS, REFERENCE_LOGPROBS, Episodes

EPISODE = "episode"
"""Extra of a sample: number of its episode in the batch."""


@dataclass(frozen=True, kw_only=True)
class Planner:
    """How samples become microbatches; both are given by the job's options."""

    for_training: Callable[[Sequence[Sample], int], StepPlan]
    """(samples, episodes that stand for them) -> this rank's share, with the loss law's weights."""
    for_scoring: Callable[[Sequence[Sample]], StepPlan]
    """The same with a weight of 1 for every trained token."""


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What became of a step's episodes."""

    scored: Scored
    updates: list[Update]
    num_tokens: int
    """Tokens of the trained episodes, prompts included."""
    num_passes: int
    """Passes over them."""


def learn(
    policy: Policy,
    episodes: Sequence[Episode],
    *,
    algorithm: AlgorithmConfig,
    loop: LoopConfig,
    planner: Planner,
    max_response_tokens: int,
    phases: Phases,
    stop: Stop | None = None,
) -> Learned:
    """All updates on the episodes of one rollout batch.  Collective.

    Raises:
        StepDropped: a rank was told to end before the first update.
    """
    kl_E = None
    if algorithm.has_kl_reward:
        with phases.phase("logprobs"):
            kl_E = episode_kl(policy, episodes, algorithm=algorithm, planner=planner)
    scored = score_episodes(
        columns_of(episodes), algorithm, max_response_tokens=max_response_tokens, kl_E=kl_E
    )
    samples = [
        episode.to_sample(advantages=float(scored.advantages_E[i]))
        for i, episode in enumerate(episodes)
        if scored.is_trained_E[i]
    ]
    if not has_gradient(scored, algorithm):
        samples = []
    objective = PolicyObjective(config=algorithm, updates_per_batch=loop.updates_per_batch)
    rows = [
        planner.for_training(some, max(1, len(episodes) // loop.minibatches)).microbatches
        for some in (samples[i :: loop.minibatches] for i in range(loop.minibatches))
        if some
    ]
    rows = with_logprobs(policy, rows, objective=objective, phases=phases)
    if stop is not None and stop.is_agreed():
        raise StepDropped
    updates = []
    shares = _shares(len(episodes), count=loop.batch_epochs * len(rows))
    with phases.phase("train"):
        for number in range(loop.batch_epochs * len(rows)):
            microbatches = rows[number % len(rows)]
            updates.append(policy.train(microbatches, objective, num_samples=shares[number]))
    if not updates:
        policy.skip(num_samples=len(episodes))
    num_tokens = sum(len(sample.tokens) for sample in samples)
    phases.count("train", num_tokens * loop.batch_epochs)
    return Learned(
        scored=scored, updates=updates, num_tokens=num_tokens, num_passes=loop.batch_epochs
    )


def has_gradient(scored: Scored, algorithm: AlgorithmConfig) -> bool:
    """Whether an update would do more than weight decay: some term of the loss is not 0."""
    has_other_terms = algorithm.has_kl_loss or algorithm.entropy_coefficient != 0
    return has_other_terms or bool((scored.advantages_E != 0).any())


def columns_of(episodes: Sequence[Episode]) -> Episodes:
    """What advantages and filters look at."""
    return Episodes(
        rewards_E=torch.tensor([e.reward for e in episodes], dtype=torch.float64),
        groups_E=torch.tensor([e.group for e in episodes], dtype=torch.int64),
        is_valid_E=torch.tensor([e.is_valid for e in episodes], dtype=torch.bool),
        is_truncated_E=torch.tensor([e.is_truncated for e in episodes], dtype=torch.bool),
        num_tokens_E=torch.tensor([e.num_sampled for e in episodes], dtype=torch.int64),
    )


def with_logprobs(
    policy: Policy,
    rows: list[list[Microbatch]],
    *,
    objective: PolicyObjective,
    phases: Phases,
) -> list[list[Microbatch]]:
    """The microbatches of each update with the log-probs the objective needs beside the sampler's.

    Only ranks with the output layer get them: they alone compute losses.
    """
    sources = {OLD_LOGPROBS: policy.logprobs, REFERENCE_LOGPROBS: policy.reference_logprobs}
    for name, compute in sources.items():
        if name not in objective.extras:
            continue
        with phases.phase("logprobs"):
            found = [compute(microbatches) for microbatches in rows]
        rows = [_attached(m, name, values) for m, values in zip(rows, found, strict=True)]
        phases.count("logprobs", sum(m.num_positions for some in rows for m in some))
    return rows


def episode_kl(
    policy: Policy, episodes: Sequence[Episode], *, algorithm: AlgorithmConfig, planner: Planner
) -> Tensor:
    """KL divergence to the reference of each episode, summed over its tokens, float64 [E]."""
    samples = []
    for number, episode in enumerate(episodes):
        if episode.is_valid:
            sample = episode.to_sample()
            numbers = torch.full_like(sample.tokens, number)
            samples.append(replace(sample, extras={EPISODE: numbers}))
    kl_E = torch.zeros(len(episodes), dtype=torch.float64)
    if not samples:
        return kl_E
    microbatches = planner.for_scoring(samples).microbatches
    now, before = policy.logprobs(microbatches), policy.reference_logprobs(microbatches)
    for microbatch, logp_BS, reference_BS in zip(microbatches, now, before, strict=False):
        is_trained_BS = microbatch.weights_BS.cpu() != 0
        terms_BS = kl_estimate(
            logp_BS.double().cpu(), reference_BS.double().cpu(), estimator=algorithm.kl_estimator
        )
        numbers = microbatch.extras[EPISODE].cpu()[is_trained_BS]
        kl_E.index_add_(0, numbers, terms_BS[is_trained_BS])
    return policy.total(kl_E)


def _attached(microbatches: list[Microbatch], name: str, values: list[Tensor]) -> list[Microbatch]:
    if not values:
        return microbatches
    return [
        replace(microbatch, extras={**microbatch.extras, name: values_BS})
        for microbatch, values_BS in zip(microbatches, values, strict=True)
    ]


def _shares(total: int, *, count: int) -> list[int]:
    """`total` in `count` nearly equal parts that add up to it."""
    return [total * (i + 1) // count - total * i // count for i in range(count)]
