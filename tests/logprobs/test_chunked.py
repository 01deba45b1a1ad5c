"""Chunked and recomputed equals full logits, on one rank: values, gradients, edges, errors."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from megatron_ext.logprobs.chunked import selected_logprobs
from megatron_ext.logprobs.config import LogProbsConfig
from tests.logprobs.comparison import random_inputs, values_and_gradients
from tests.references import full_logits_logprobs

NUM_TOKENS, WIDTH, COLUMNS, VOCAB_SIZE = 7, 5, 16, 13
LEAVES = ("hidden_TD", "weight_VD", "bias_V")


def small_inputs(dtype: torch.dtype = torch.float64, **sizes) -> dict:
    sizes = {"width": WIDTH, "columns": COLUMNS, "vocab_size": VOCAB_SIZE, **sizes}
    return random_inputs(sizes.pop("num_tokens", NUM_TOKENS), dtype=dtype, **sizes)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_size", [1, 3, NUM_TOKENS, NUM_TOKENS + 1, 0])
@pytest.mark.parametrize("num_tokens", [NUM_TOKENS, 1])
def test_equals_full_logits(num_tokens, chunk_size, temperature):
    inputs = small_inputs(num_tokens=num_tokens)
    options = {"vocab_size": VOCAB_SIZE, "temperature": temperature}
    leaves = [inputs[name] for name in LEAVES]
    found = selected_logprobs(**inputs, **options, chunk_size=chunk_size, with_entropy=True)
    got = values_and_gradients(found, leaves)
    wanted = values_and_gradients(full_logits_logprobs(**inputs, **options), leaves)
    assert_close(got, wanted, rtol=1e-10, atol=1e-12)  # float64; only the order of sums differs


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gradcheck(with_entropy, with_bias):
    inputs = small_inputs(num_tokens=4, width=3)
    leaves = [inputs[name] for name in LEAVES[: 2 + with_bias]]

    def function(hidden_TD, weight_VD, bias_V=None):
        found = selected_logprobs(
            hidden_TD,
            weight_VD,
            inputs["labels_T"],
            vocab_size=VOCAB_SIZE,
            bias_V=bias_V,
            temperature=0.8,
            chunk_size=1,
            with_entropy=with_entropy,
            needed_T=torch.tensor([True, False, True, True]),
        )
        return tuple(x for x in found if x is not None)

    assert torch.autograd.gradcheck(function, leaves)


def test_cases_e1_and_b13_from_hidden_states():
    logits_TV = torch.tensor([[1.0, 0, 0, 0, 0, 9, 9, 9]]).double()
    weight_VD = torch.eye(8).double()
    e1 = selected_logprobs(
        logits_TV, weight_VD, torch.tensor([0]), vocab_size=5, chunk_size=1, with_entropy=True
    )
    assert_close(e1.logprobs.item(), -0.904832, atol=5e-7, rtol=0)
    assert_close(e1.entropy.item(), 1.500223, atol=5e-7, rtol=0)
    b13 = selected_logprobs(
        torch.tensor([[2.0, 0, -1]]), torch.eye(3), torch.tensor([0]), vocab_size=3, temperature=0.5
    )
    assert_close(b13.logprobs.item(), -0.020581, atol=5e-7, rtol=0)


@pytest.mark.parametrize("chunk_size", [1, 0])
def test_extreme_logits(chunk_size):
    inputs = small_inputs()
    with torch.no_grad():
        inputs["hidden_TD"] *= 1e4
    leaves = [inputs[name] for name in LEAVES]
    found = selected_logprobs(
        **inputs, vocab_size=VOCAB_SIZE, chunk_size=chunk_size, with_entropy=True
    )
    wanted = full_logits_logprobs(**inputs, vocab_size=VOCAB_SIZE)
    # The logits are near 1e4 and exact to 1e-12 there, which is the error their exp inherits.
    assert_close(
        values_and_gradients(found, leaves),
        values_and_gradients(wanted, leaves),
        rtol=1e-10,
        atol=1e-9,
    )


@pytest.mark.parametrize("needed", [[0, 1, 1, 0, 1, 0, 0], [0] * NUM_TOKENS, [1] * NUM_TOKENS])
def test_positions_not_needed_cost_nothing_and_change_nothing(needed):
    inputs = small_inputs()
    needed_T = torch.tensor(needed, dtype=torch.bool)
    labels_T = torch.where(needed_T, inputs.pop("labels_T"), -100)
    leaves = [inputs[name] for name in LEAVES]
    options = {"vocab_size": VOCAB_SIZE, "chunk_size": 2, "with_entropy": True}
    found = selected_logprobs(**inputs, labels_T=labels_T, **options, needed_T=needed_T)
    alone = full_logits_logprobs(**inputs, labels_T=labels_T.clamp(min=0), vocab_size=VOCAB_SIZE)
    alone = type(alone)(*(torch.where(needed_T, x, 0) for x in alone))
    assert_close(
        values_and_gradients(found, leaves),
        values_and_gradients(alone, leaves),
        rtol=1e-10,
        atol=1e-12,
    )
    assert torch.equal(found.logprobs == 0, ~needed_T)


def test_no_tokens_still_have_a_graph():
    inputs = small_inputs(num_tokens=0)
    found = selected_logprobs(**inputs, vocab_size=VOCAB_SIZE, with_entropy=True)
    grads = values_and_gradients(found, [inputs[name] for name in LEAVES])[2:]
    assert found.logprobs.shape == found.entropy.shape == (0,)
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)


def test_entropy_only_watched_leaves_the_gradient_as_it_is():
    inputs = small_inputs()
    grads = []
    for with_entropy in (False, True):
        found = selected_logprobs(
            **inputs, vocab_size=VOCAB_SIZE, chunk_size=2, with_entropy=with_entropy
        )
        leaves = [inputs[name] for name in LEAVES]
        grads.append(torch.autograd.grad(found.logprobs.sum(), leaves))
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


def test_frozen_weight_gets_no_gradient():
    inputs = small_inputs()
    wanted = values_and_gradients(
        full_logits_logprobs(**inputs, vocab_size=VOCAB_SIZE), [inputs["hidden_TD"]]
    )
    frozen = inputs | {name: inputs[name].detach() for name in ("weight_VD", "bias_V")}
    found = selected_logprobs(**frozen, vocab_size=VOCAB_SIZE, chunk_size=2, with_entropy=True)
    got = values_and_gradients(found, [frozen["hidden_TD"]])
    assert_close(got, wanted, rtol=1e-10, atol=1e-12)


def test_with_and_without_grad_are_bit_equal():
    inputs = small_inputs(torch.float32)
    with_grad = selected_logprobs(**inputs, vocab_size=VOCAB_SIZE, chunk_size=3)
    with torch.no_grad():
        without = selected_logprobs(**inputs, vocab_size=VOCAB_SIZE, chunk_size=3)
    assert torch.equal(with_grad.logprobs, without.logprobs)


@pytest.mark.parametrize("chunk_size", [1, 8, 0])
def test_bfloat16(chunk_size):
    inputs = random_inputs(64, width=32, columns=512, vocab_size=500, dtype=torch.bfloat16)
    exact = {
        name: x.detach().double().requires_grad_() if name in LEAVES else x
        for name, x in inputs.items()
    }
    got = values_and_gradients(
        selected_logprobs(**inputs, vocab_size=500, chunk_size=chunk_size, with_entropy=True),
        [inputs[name] for name in LEAVES],
    )
    wanted = values_and_gradients(
        full_logits_logprobs(**exact, vocab_size=500), [exact[name] for name in LEAVES]
    )
    # A logit is rounded once to 8 bits: a relative 2^-9, and the largest here is below 32.
    for value_T, exact_T in zip(got[:2], wanted[:2], strict=True):
        assert value_T.dtype == torch.float32
        assert (value_T - exact_T).abs().max() < 2 * 2**-9 * 32
    # A gradient also rounds d loss / d logit and itself; its sum over tiles does not add to that.
    for grad, exact_grad in zip(got[2:], wanted[2:], strict=True):
        assert grad.dtype == torch.bfloat16
        assert (grad - exact_grad).norm() < 0.02 * exact_grad.norm()


def test_everything_wrong_is_named_at_once():
    with pytest.raises(ValueError) as error:
        selected_logprobs(
            torch.zeros(2, 3, 4),
            torch.zeros(8, 4, dtype=torch.bfloat16),
            torch.zeros(2),
            vocab_size=8,
            bias_V=torch.zeros(7),
            needed_T=torch.zeros(5),
            chunk_size=-1,
        )
    for part in (
        "hidden [2, 3, 4] and weight [8, 4]",
        "hidden is torch.float32 and weight torch.bfloat16",
        "labels are torch.float32 [2]",
        "bias is torch.float32 [7], must be torch.bfloat16 [8]",
        "needed is torch.float32 [5]",
        "chunk_size -1",
    ):
        assert part in str(error.value)


def test_labels_outside_the_vocabulary():
    inputs = small_inputs()
    inputs["labels_T"][[2, 4]] = torch.tensor([-100, VOCAB_SIZE])
    with pytest.raises(ValueError, match=r"2 of 7 labels .* first is -100, at needed position 2"):
        selected_logprobs(**inputs, vocab_size=VOCAB_SIZE)
    unchecked = selected_logprobs(**inputs, vocab_size=VOCAB_SIZE, validate_labels=False)
    assert unchecked.logprobs.isnan().nonzero()[:, 0].tolist() == [2, 4]


def test_temperature_must_be_positive():
    with pytest.raises(ValueError, match=r"temperature 0\.0 is not a positive number"):
        selected_logprobs(**small_inputs(), vocab_size=VOCAB_SIZE, temperature=0.0)


def test_config_refuses_a_negative_chunk():
    assert LogProbsConfig().logprob_chunk_size == 1024
    with pytest.raises(ValueError, match="--logprob-chunk-size -1 must be at least 0"):
        LogProbsConfig(logprob_chunk_size=-1)
