"""Each loss, KL estimator and ratio against plain floats, and the B values of CASES.md."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.logprobs.chunked import selected_logprobs
from megatron_ext.rl import losses
from megatron_ext.rl.kl import kl_estimate
from megatron_ext.rl.ratios import log_ratio, sampler_weight
from tests.rl import naive

LOG_PROBS = st.floats(-1.0, 0.0) | st.floats(-100.0, 0.0)
ADVANTAGES = st.floats(-5, 5)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def value_and_slope(loss_of, logp):
    """Loss of one token and its derivative in its log-prob."""
    logp_T = tensor(logp).requires_grad_()
    loss_T = loss_of(logp_T)
    (slope,) = torch.autograd.grad(loss_T.sum(), logp_T)
    return float(loss_T.detach()), float(slope)


def clipped_from_logp(old, advantage, *, low, high, dual):
    return lambda logp_T: losses.clipped_loss(
        log_ratio(logp_T, tensor(old)).exp(),
        advantage_T=tensor(advantage),
        clip_low=low,
        clip_high=high,
        dual_clip=dual,
    )


@settings(max_examples=60, deadline=None)
@given(LOG_PROBS, LOG_PROBS, ADVANTAGES, st.sampled_from([0.0, 3.0]))
def test_clipped_loss_equals_its_branches(logp, old, advantage, dual):
    found = value_and_slope(clipped_from_logp(old, advantage, low=0.2, high=0.28, dual=dual), logp)
    ratio = math.exp(naive.limited(logp - old))
    slope = ratio if abs(logp - old) <= naive.LIMIT else 0.0
    want = naive.surrogate(ratio, slope, advantage, low=0.2, high=0.28, dual=dual)
    assert found == pytest.approx(want, rel=1e-12, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(LOG_PROBS, LOG_PROBS, st.sampled_from(["k1", "k2", "k3"]))
def test_kl_estimates_equal_plain_floats(logp, reference, estimator):
    found = value_and_slope(
        lambda logp_T: kl_estimate(logp_T, tensor(reference), estimator=estimator), logp
    )
    assert found == pytest.approx(naive.kl(logp, reference, estimator), rel=1e-12, abs=1e-12)


def test_kl_estimates_average_to_the_divergence():
    """Over all tokens of two distributions: k1 and k3 exactly, and each gradient as documented."""
    policy = tensor(0.5, 0.3, -1.0, 0.1).log_softmax(0).requires_grad_()
    logits = tensor(0.5, 0.3, -1.0, 0.1).requires_grad_()
    reference = tensor(0.1, -0.4, 0.2, 0.9).log_softmax(0)
    divergence = float((policy.exp() * (policy - reference)).sum().detach())
    exact = torch.autograd.grad(
        (logits.log_softmax(0).exp() * (logits.log_softmax(0) - reference)).sum(), logits
    )[0]
    for estimator in ("k1", "k2", "k3"):
        logp = logits.log_softmax(0)
        terms = kl_estimate(logp, reference, estimator=estimator)
        mean = (logp.exp().detach() * terms).sum()  # tokens drawn from the policy, then fixed
        (gradient,) = torch.autograd.grad(mean, logits)
        if estimator != "k2":
            assert float(mean.detach()) == pytest.approx(divergence, rel=1e-12)
        if estimator == "k1":
            assert gradient.abs().max() < 1e-15  # so it is refused in the loss
        if estimator == "k2":
            torch.testing.assert_close(gradient, exact, rtol=1e-12, atol=1e-15)


def test_sampler_weight_is_capped_and_constant():
    old, sampler = tensor(-1.0, -1.0, -1.0).requires_grad_(), tensor(-1.0, -3.0, -100.0)
    weight = sampler_weight(log_ratio(old, sampler), cap=2.0)
    assert weight.tolist() == [1.0, 2.0, 2.0]
    assert not weight.requires_grad
    uncapped = sampler_weight(log_ratio(old, sampler), cap=math.inf)
    assert uncapped.tolist() == pytest.approx([1.0, math.e**2, math.e**20])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_b1_extreme_ratio_is_finite_and_dual_clip_bounds_it(dtype):
    logp = torch.tensor([-1.0], dtype=dtype, requires_grad=True)
    ratio = log_ratio(logp, torch.tensor([-100.0], dtype=dtype)).exp()
    bad = torch.tensor([-1.0], dtype=dtype)
    plain = losses.clipped_loss(ratio, advantage_T=bad, clip_low=0.2, clip_high=0.28)
    assert float(plain.detach()) == pytest.approx(math.exp(20), rel=1e-6)
    dual = losses.clipped_loss(ratio, advantage_T=bad, clip_low=0.2, clip_high=0.28, dual_clip=3)
    assert dual.tolist() == [3.0]
    (plain + dual).sum().backward()
    assert logp.grad.tolist() == [0.0]


def test_b4_each_side_has_its_own_range():
    ratio = tensor(1.25, 1.35, 1.35, 0.75, 0.75)
    advantage = tensor(1, 1, -1, -1, 1)
    clip = {"clip_low": 0.2, "clip_high": 0.28}
    found = losses.clipped_loss(ratio, advantage_T=advantage, **clip)
    assert found.tolist() == pytest.approx([-1.25, -1.28, 1.35, 0.80, -0.75], rel=1e-12)
    fractions = losses.clip_fractions(ratio, advantage_T=advantage, **clip)
    assert fractions["clip_fraction_high"].tolist() == [0, 1, 0, 0, 0]
    assert fractions["clip_fraction_low"].tolist() == [0, 0, 0, 1, 0]


def test_b7_k3_as_a_loss_has_a_gradient():
    found = value_and_slope(lambda logp_T: kl_estimate(logp_T, tensor(-2.0), estimator="k3"), -1.0)
    assert found == pytest.approx((0.367879, 0.632121), abs=1e-6)


def test_b13_the_trainer_divides_by_the_samplers_temperature():
    found = selected_logprobs(
        tensor(2.0, 0.0, -1.0)[None],
        torch.eye(3, dtype=torch.float64),
        torch.tensor([0]),
        vocab_size=3,
        temperature=0.5,
    )
    assert found.logprobs.tolist() == pytest.approx([-0.020581], abs=1e-6)
