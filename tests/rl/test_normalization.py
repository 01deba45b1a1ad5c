"""The A values of CASES.md with policy losses: one law, however tokens are split and padded."""

import pytest
import torch

from megatron_ext.packing import PackingConfig, RowLayout, Sample, build_microbatches, loss_weights
from megatron_ext.packing.plan import ReplicaLayout, plan_step
from megatron_ext.rl.config import AlgorithmConfig
from megatron_ext.rl.objective import PolicyObjective
from megatron_ext.rl.types import ADVANTAGES, SAMPLER_LOGPROBS
from tests.rl.steps import NAN, weighted_sum

CLIP = PolicyObjective(config=AlgorithmConfig(algorithm="grpo", old_policy="sampler"))
SEQUENCE = PolicyObjective(
    config=AlgorithmConfig(algorithm="gspo", old_policy="sampler", ratio_level="sequence")
)


def episode(*losses, mask=None):
    """An on-policy episode, one prompt token first, whose tokens have the given losses.

    At a ratio of 1 the loss of a token is minus its advantage.
    """
    trained = [True] * len(losses) if mask is None else list(mask)
    values = torch.tensor([NAN, *losses])
    return Sample(
        tokens=torch.arange(len(losses) + 1),
        mask=torch.tensor([False, *trained]),
        extras={ADVANTAGES: -values, SAMPLER_LOGPROBS: torch.full_like(values, -1.0)},
    )


def on_policy(microbatch):
    """Log-probs equal to the sampler's, and NaN where nothing is trained."""
    logprobs_BS = torch.where(microbatch.weights_BS != 0, -1.0, NAN)
    return logprobs_BS.requires_grad_()


def step_loss(samples, *, objective=CLIP, dp_size=1, config=None, seq_length=16, **replica):
    """The loss of a step as its data-parallel ranks compute it together."""
    total, count = 0.0, 0
    for rank in range(dp_size):
        plan = plan_step(
            samples,
            config or PackingConfig(),
            replica=ReplicaLayout(dp_size=dp_size, dp_rank=rank, **replica),
            seq_length=seq_length,
            micro_batch_size=1,
        )
        for microbatch in plan.microbatches:
            loss = weighted_sum(objective, on_policy(microbatch), microbatch)
            total, count = total + float(loss.detach()), count + microbatch.count
    return total / count


@pytest.mark.parametrize("objective", [CLIP, SEQUENCE], ids=["token", "sequence"])
@pytest.mark.parametrize("dp_size", [1, 2])
def test_a1_every_token_of_the_global_batch_weighs_the_same(dp_size, objective):
    samples = [episode(2.0, 2.0, 2.0, 2.0), episode(8.0)]
    assert step_loss(samples, dp_size=dp_size, objective=objective) == pytest.approx(3.2)


def test_a4_tokens_split_over_context_parallel_ranks():
    (microbatch,) = plan_step(
        [episode(1.0, 1.0, 1.0, 1.0)],
        PackingConfig(),
        replica=ReplicaLayout(),
        seq_length=16,
        micro_batch_size=1,
    ).microbatches
    losses = CLIP(on_policy(microbatch), microbatch).losses_BS
    weighted = torch.where(microbatch.weights_BS != 0, losses * microbatch.weights_BS, 0)
    for ranks in (1, 2):
        halves = weighted.detach()[:, :4].chunk(ranks, dim=1)
        assert float(sum(h.sum() for h in halves)) / microbatch.count == 1.0


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("max_tokens", [6, 16, 64])
def test_a8_constant_normalisation_does_not_see_padding(packing, max_tokens):
    config = PackingConfig(
        packing=packing,
        max_tokens_per_microbatch=max_tokens,
        loss_normalization="constant",
        loss_normalization_max_length=8,
    )
    samples = [episode(1.0, 1.0, 1.0, 1.0), episode(1.0, 1.0)]
    assert step_loss(samples, config=config) == pytest.approx(0.375)


def test_a10_masked_losses_and_gradients_are_removed():
    samples = [episode(3.0, 50.0, mask=[1, 0]), episode(5.0, -20.0, mask=[1, 0])]
    assert step_loss(samples) == pytest.approx(4.0)
    law = loss_weights([s.mask for s in samples], microbatches=[[0, 1]], mode="global-token-mean")
    layout = RowLayout(extras={ADVANTAGES: torch.float32, SAMPLER_LOGPROBS: torch.float32})
    (microbatch,) = build_microbatches(samples, microbatches=[[0, 1]], loss=law, layout=layout)
    logprobs_BS = on_policy(microbatch)
    assert CLIP(logprobs_BS, microbatch).losses_BS.tolist() == [[3.0, 0, 0, 5.0, 0, 0]]
    weighted_sum(CLIP, logprobs_BS, microbatch).backward()
    assert logprobs_BS.grad.tolist() == [[3.0, 0.0, 0.0, 5.0, 0.0, 0.0]]


@pytest.mark.parametrize("objective", [CLIP, SEQUENCE], ids=["token", "sequence"])
def test_a13_nothing_trained_is_a_loss_of_0_with_a_graph(objective):
    plan = plan_step(
        [episode(2.0, 3.0, mask=[0, 0])],
        PackingConfig(packing=True),
        replica=ReplicaLayout(),
        seq_length=16,
        micro_batch_size=1,
    )
    (microbatch,) = plan.microbatches
    assert microbatch.count == 0
    logprobs_BS = on_policy(microbatch)
    loss = weighted_sum(objective, logprobs_BS, microbatch)
    assert float(loss.detach()) == 0.0
    loss.backward()
    assert logprobs_BS.grad.eq(0).all()


def test_a22_uneven_lengths_on_two_interleaved_ranks():
    samples = [episode(*[2.0] * 8), *(episode(5.0) for _ in range(4))]
    config = PackingConfig(packing=True, max_tokens_per_microbatch=9)
    plans = [
        plan_step(
            samples,
            config,
            replica=ReplicaLayout(dp_size=2, dp_rank=r, pipeline_size=2, group_size=2),
            seq_length=9,
            micro_batch_size=1,
        )
        for r in range(2)
    ]
    numbers = [len(plan.microbatches) for plan in plans]
    assert numbers[0] == numbers[1] and numbers[0] % 2 == 0
    assert sum(m.count for plan in plans for m in plan.microbatches) == 12
    loss = step_loss(samples, dp_size=2, config=config, seq_length=9, pipeline_size=2, group_size=2)
    assert loss == pytest.approx((8 * 2 + 4 * 5) / 12)
