"""Episodes as the step sees them: packed or padded microbatches, the objective, the loss law."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from megatron_ext.packing import Microbatch, RowLayout, Sample, build_microbatches, loss_weights
from megatron_ext.packing.batch import to_token_values
from megatron_ext.rl.objective import PolicyObjective
from tests.rl.naive import Episode

NAN = float("nan")


def weighted_sum(objective: PolicyObjective, logprobs_BS: Tensor, microbatch: Microbatch) -> Tensor:
    """What one microbatch adds to the loss of a step, before it is divided by N."""
    entropy_BS = microbatch.extras.get("entropy")
    losses_BS = objective(logprobs_BS, microbatch, entropy_BS=entropy_BS).losses_BS
    weights_BS = microbatch.weights_BS
    return torch.where(weights_BS != 0, losses_BS * weights_BS, 0).sum()


def run_step(
    objective: PolicyObjective,
    samples: Sequence[Sample],
    *,
    mode: str = "global-token-mean",
    microbatches: Sequence[Sequence[int]],
    packed: bool = True,
    **law,
) -> tuple[float, list[Tensor]]:
    """Loss of a step and its gradient in the log-probs [n] of every sample, aligned with tokens.

    Samples carry their log-probs as the extra `logp`.
    """
    weights = loss_weights(
        [s.mask for s in samples], microbatches=microbatches, mode=mode, packed=packed, **law
    )
    layout = RowLayout(
        packed=packed, pad_to_multiple=4, extras={n: v.dtype for n, v in samples[0].extras.items()}
    )
    built = build_microbatches(samples, microbatches=microbatches, loss=weights, layout=layout)
    total, gradients = 0.0, [torch.empty(0)] * len(samples)
    for members, microbatch in zip(microbatches, built, strict=True):
        logprobs_BS = microbatch.extras["logp"].requires_grad_()
        loss = weighted_sum(objective, logprobs_BS, microbatch)
        loss.backward()
        total += float(loss.detach())
        lengths = [len(samples[i].tokens) for i in members]
        pieces = to_token_values(
            logprobs_BS.grad / max(weights.total, 1), lengths=lengths, packed=packed
        )
        gradients = [
            pieces[members.index(i)] if i in members else g for i, g in enumerate(gradients)
        ]
    return total / max(weights.total, 1), gradients


def to_sample(episode: Episode) -> Sample:
    """The episode with NaN wherever nothing is trained."""

    def column(values: Sequence[float]) -> Tensor:
        kept = [v if t in episode.trained else NAN for t, v in enumerate(values)]
        return torch.tensor(kept, dtype=torch.float64)

    return Sample(
        tokens=torch.arange(len(episode.mask)),
        mask=torch.tensor(episode.mask),
        extras={
            "logp": column(episode.logp),
            "old_logprobs": column(episode.old),
            "sampler_logprobs": column(episode.sampler),
            "reference_logprobs": column(episode.reference),
            "entropy": column(episode.entropy),
            "advantages": column([episode.advantage] * len(episode.mask)),
        },
    )


@st.composite
def batches(draw) -> tuple[list[Episode], list[list[int]]]:
    """Episodes with any masks, and microbatches that hold each once, some of them fillers.

    Log-probs of the policies are near each other or far beyond every clip; as they come from a
    seed, hypothesis spends its time on the structure.
    """
    masks = draw(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=4))
    values = random.Random(draw(st.integers(0, 10**6)))
    found = [episode_of(mask, values) for mask in masks]
    microbatches: list[list[int]] = [[] for _ in range(draw(st.integers(1, 3)))]
    for i in range(len(found)):
        microbatches[draw(st.integers(0, len(microbatches) - 1))].append(i)
    return found, microbatches


def episode_of(mask: list[bool], values: random.Random) -> Episode:
    """An episode with random numbers; half of the log-ratios are below 0.5, some above 20."""

    def column() -> list[float]:
        return [-values.random() * values.choice([0.5, 0.5, 3, 60]) for _ in mask]

    return Episode(
        logp=column(),
        old=column(),
        sampler=column(),
        reference=column(),
        entropy=[10 * values.random() for _ in mask],
        mask=mask,
        advantage=values.choice([-2.0, -0.5, 0.0, 0.25, 1.0]),
    )
