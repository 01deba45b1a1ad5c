"""Log-probabilities from logits on one rank: known values, padding, extremes, errors."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from megatron_ext.logprobs.vocab_parallel import VocabShard, vocab_parallel_logprobs

POISON = 1e30
"""Logit of padding columns: it would own any softmax it got into."""


def test_case_e1_padding_is_not_in_the_softmax():
    logits_TV = torch.tensor([[1.0, 0, 0, 0, 0, 0, 0, 0]], dtype=torch.float64)
    found = vocab_parallel_logprobs(logits_TV, torch.tensor([0]), vocab_size=5, with_entropy=True)
    assert_close(found.logprobs, torch.tensor([-0.904832]).double(), atol=5e-7, rtol=0)
    assert_close(found.entropy, torch.tensor([1.500223]).double(), atol=5e-7, rtol=0)


def test_case_b13_temperature_is_the_samplers():
    found = vocab_parallel_logprobs(
        torch.tensor([[2.0, 0, -1]]), torch.tensor([0]), vocab_size=3, temperature=0.5
    )
    assert_close(found.logprobs, torch.tensor([-0.020581]), atol=5e-7, rtol=0)
    assert found.entropy is None


def test_padding_gets_no_gradient_and_the_logits_stay():
    logits_TV = torch.randn(4, 8, dtype=torch.float64)
    logits_TV[:, 5:] = POISON
    before_TV = logits_TV.clone()
    logits_TV.requires_grad_()
    labels_T = torch.tensor([0, 4, 2, 2])
    found = vocab_parallel_logprobs(logits_TV, labels_T, vocab_size=5, with_entropy=True)
    alone = vocab_parallel_logprobs(before_TV[:, :5], labels_T, vocab_size=5, with_entropy=True)
    assert torch.equal(found.logprobs, alone.logprobs)
    assert torch.equal(found.entropy, alone.entropy)
    (grad_TV,) = torch.autograd.grad(found.logprobs.sum() + found.entropy.sum(), logits_TV)
    assert torch.equal(grad_TV[:, 5:], torch.zeros(4, 3).double())
    assert grad_TV[:, :5].abs().min() > 0
    assert torch.equal(logits_TV.detach(), before_TV)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradcheck(with_entropy, temperature):
    logits_TV = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)

    def function(logits_TV):
        found = vocab_parallel_logprobs(
            logits_TV,
            torch.tensor([0, 3, 4]),
            vocab_size=5,
            temperature=temperature,
            with_entropy=with_entropy,
        )
        return tuple(x for x in found if x is not None)

    assert torch.autograd.gradcheck(function, (logits_TV,))


def test_extreme_logits_in_float32_lose_nothing():
    logits_TV = torch.tensor([[1e4, -1e4, 1e4 - 3, 0], [-1e4, -1e4, -1e4, -1e4]])
    labels_T = torch.tensor([2, 1])
    logits_TV.requires_grad_()
    found = vocab_parallel_logprobs(logits_TV, labels_T, vocab_size=4, with_entropy=True)
    wanted_TV = logits_TV.detach().double().log_softmax(dim=1)
    # 1e4 and 1e4 - 3 are exact in float32, so the only error is that of exp and log: a few 2^-24.
    assert_close(
        found.logprobs.double(), wanted_TV.gather(1, labels_T[:, None])[:, 0], rtol=1e-6, atol=0
    )
    assert_close(
        found.entropy.double(), -(wanted_TV.exp() * wanted_TV).sum(dim=1), rtol=1e-6, atol=0
    )
    (grad_TV,) = torch.autograd.grad(found.logprobs.sum(), logits_TV)
    is_label_TV = torch.nn.functional.one_hot(labels_T, 4)
    assert_close(grad_TV.double(), is_label_TV - wanted_TV.exp(), rtol=1e-6, atol=1e-7)


def test_sums_of_bfloat16_logits_are_in_float32():
    logits_TV = torch.randn(3, 5000, dtype=torch.bfloat16, requires_grad=True)
    labels_T = torch.tensor([0, 17, 4999])
    found = vocab_parallel_logprobs(logits_TV, labels_T, vocab_size=5000)
    wanted_TV = logits_TV.detach().double().log_softmax(dim=1)
    assert found.logprobs.dtype == torch.float32
    assert_close(
        found.logprobs.double(), wanted_TV.gather(1, labels_T[:, None])[:, 0], rtol=1e-6, atol=0
    )
    (grad_TV,) = torch.autograd.grad(found.logprobs.sum(), logits_TV)
    assert grad_TV.dtype == torch.bfloat16


def test_label_outside_the_vocabulary_is_nan_in_value_and_gradient():
    logits_TV = torch.zeros(4, 8, requires_grad=True)
    found = vocab_parallel_logprobs(logits_TV, torch.tensor([0, 5, -100, 8]), vocab_size=5)
    assert found.logprobs.isnan().tolist() == [False, True, True, True]
    (grad_TV,) = torch.autograd.grad(found.logprobs.sum(), logits_TV)
    assert grad_TV[:, :5].isnan().all(dim=1).tolist() == [False, True, True, True]


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_temperature_must_be_positive(temperature):
    with pytest.raises(ValueError, match=f"temperature {temperature} is not a positive number"):
        vocab_parallel_logprobs(
            torch.zeros(1, 2), torch.tensor([0]), vocab_size=2, temperature=temperature
        )


@pytest.mark.parametrize("vocab_size", [0, 9])
def test_vocabulary_must_fit_the_columns(vocab_size):
    with pytest.raises(ValueError, match=f"vocab_size {vocab_size} does not fit .* are 8, padding"):
        VocabShard.of(8, vocab_size=vocab_size, tp_group=None)


def test_shapes_must_match():
    with pytest.raises(ValueError, match=r"logits are \[3, 4\] and labels \[2\]"):
        vocab_parallel_logprobs(torch.zeros(3, 4), torch.tensor([0, 1]), vocab_size=4)
