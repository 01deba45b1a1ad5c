"""Lines of the self-check for reinforcement learning: sampler against trainer, and ratios of 1."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_ext.packing.batch import Sample
from megatron_ext.rl.config import AlgorithmConfig
from megatron_ext.rl.objective import PolicyObjective
from megatron_ext.rl.types import ADVANTAGES, OLD_LOGPROBS, SAMPLER_LOGPROBS
from megatron_ext.rollout.engine import RolloutEngine
from megatron_ext.rollout.types import Completion, Request
from megatron_ext.upstream.evaluate import logprobs_of, token_values
from megatron_ext.upstream.rollout import MegatronDecoder
from megatron_ext.upstream.self_check_setup import (
    Line,
    Setup,
    judged,
    packed_row,
    plan_of,
    ragged_samples,
    random_tokens,
    skipped,
)

_PROMPTS = (3, 9, 5)
"""Lengths, in tokens."""
_NEW_TOKENS = 12


def sampler_is_trainer(setup: Setup) -> Line:
    """Log-probs that the sampler records against the trainer's of the same tokens."""
    name = "sampler = trainer"
    advice = "rollouts do not come from the trained policy: see --transformer-impl, precision"
    try:
        decoder = MegatronDecoder(setup.options.megatron, setup.layout, setup.stepper.model.chunks)
    except ValueError as error:
        return skipped(name, reason=" ".join(str(error).split()))
    ids = random_tokens(setup).flatten().tolist()
    new_tokens = min(_NEW_TOKENS, setup.length - max(_PROMPTS))
    requests = [
        Request(prompt_ids=tuple(ids[:length]), max_new_tokens=new_tokens, seed=length)
        for length in _PROMPTS
    ]
    found = RolloutEngine(decoder).generate(requests)
    gaps = [_gap(setup, *pair) for pair in zip(requests, found, strict=True)]
    return judged(
        name,
        passed=max(gaps) <= setup.tolerance,
        number=f"max {max(gaps):.1e} nats",
        advice=advice,
    )


def ratios_are_one(setup: Setup) -> Line:
    """The ratio of an update on the policy that computed the old log-probs."""
    samples = [_on_policy(sample) for sample in ragged_samples(setup)] * setup.layout.dp_size
    microbatches = plan_of(setup, samples).microbatches
    old = token_values(setup.stepper, microbatches)
    if old:
        microbatches = [
            replace(m, extras={**m.extras, OLD_LOGPROBS: values_BS})
            for m, values_BS in zip(microbatches, old, strict=True)
        ]
    algorithm = AlgorithmConfig(algorithm="grpo-plus")
    objective = PolicyObjective(config=algorithm, updates_per_batch=2)
    deviation = setup.stepper.forward_backward(microbatches, objective).statistics[
        "ratio_deviation"
    ]
    return judged(
        "ratio 1 on policy",
        passed=deviation <= 1e-6,
        number=f"mean |ratio - 1| {deviation:.1e}",
        advice="a forward without gradients differs from one with them: look for dropout or "
        "kernels that depend on it",
    )


def _gap(setup: Setup, request: Request, completion: Completion) -> float:
    """Largest difference of a completion's log-probs."""
    tokens = torch.tensor([*request.prompt_ids, *completion.token_ids])
    mask = torch.arange(len(tokens)) >= len(request.prompt_ids)
    row = packed_row(setup, [Sample(tokens=tokens, mask=mask)])
    trainer = logprobs_of(setup.stepper, row)[row.weights_BS != 0]
    return float((trainer - torch.tensor(completion.logprobs)).abs().max())


def _on_policy(sample: Sample) -> Sample:
    zeros = torch.zeros(len(sample.tokens))
    return replace(sample, extras={ADVANTAGES: zeros + 1, SAMPLER_LOGPROBS: zeros})
