"""The vocabulary over n gloo ranks equals one process: values, gradients, any padding."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from megatron_ext.logprobs.chunked import selected_logprobs
from megatron_ext.logprobs.vocab_parallel import LogProbs, vocab_parallel_logprobs
from tests.logprobs.comparison import (
    random_inputs,
    values_and_gradients,
    weighted_sum,
)
from tests.references import full_logits_logprobs

VOCAB_SIZE = 10
NEEDED_T = torch.tensor([True, False, True, True, False, True])


def whole_inputs(tp: int) -> dict[str, torch.Tensor]:
    """The same model for every tp; its padding (to 4 columns a rank, at least 16) differs."""
    columns = max(16, 4 * tp)
    inputs = random_inputs(6, width=5, columns=16, vocab_size=VOCAB_SIZE, dtype=torch.float64)
    padded = inputs["weight_VD"].new_full((columns, 5), 1e30)
    padded[:VOCAB_SIZE] = inputs["weight_VD"].detach()[:VOCAB_SIZE]
    return inputs | {"weight_VD": padded.requires_grad_(), "bias_V": inputs["bias_V"]}


def my_slice(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return x.detach().chunk(size)[rank].clone().requires_grad_()


def step(group: dist.ProcessGroup, *, chunk_size: int, needed_T: torch.Tensor | None) -> list:
    """Values; gradients of hidden states (summed, as the caller owes) and of this rank's rows."""
    inputs = whole_inputs(dist.get_world_size(group))
    hidden_TD = inputs["hidden_TD"]
    weight_VD, bias_V = my_slice(inputs["weight_VD"], group), my_slice(inputs["bias_V"], group)
    found = selected_logprobs(
        hidden_TD,
        weight_VD,
        inputs["labels_T"],
        vocab_size=VOCAB_SIZE,
        tp_group=group,
        bias_V=bias_V,
        temperature=0.7,
        chunk_size=chunk_size,
        with_entropy=True,
        needed_T=needed_T,
    )
    results = values_and_gradients(found, [hidden_TD, weight_VD, bias_V])
    dist.all_reduce(results[2], group=group)
    return results


def step_on_world(chunk_size: int, needed_T: torch.Tensor | None = None) -> list:
    return step(dist.group.WORLD, chunk_size=chunk_size, needed_T=needed_T)


def step_on_two_groups() -> list:
    """Two tensor-parallel groups of two, of ranks that are not neighbours: 0 and 2, 1 and 3."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return step(groups[dist.get_rank() % 2], chunk_size=2, needed_T=None)


def step_from_logits() -> list:
    group = dist.group.WORLD
    inputs = whole_inputs(dist.get_world_size(group))
    logits_TV = inputs["hidden_TD"] @ my_slice(inputs["weight_VD"], group).detach().T
    logits_TV = logits_TV.detach().requires_grad_()
    found = vocab_parallel_logprobs(
        logits_TV,
        inputs["labels_T"],
        vocab_size=VOCAB_SIZE,
        tp_group=group,
        temperature=0.7,
        with_entropy=True,
    )
    return values_and_gradients(found, [logits_TV])


def one_process(needed_T: torch.Tensor | None = None) -> list:
    inputs = whole_inputs(1)
    found = full_logits_logprobs(**inputs, vocab_size=VOCAB_SIZE, temperature=0.7)
    if needed_T is not None:
        found = LogProbs(*(torch.where(needed_T, x, 0) for x in found))
    return values_and_gradients(found, [inputs[x] for x in ("hidden_TD", "weight_VD", "bias_V")])


def assert_ranks_equal_one_process(got: list[list], wanted: list) -> None:
    """float64; only the order of sums differs."""
    for results in got:
        assert_close(results[:3], wanted[:3], rtol=1e-10, atol=1e-12)
        assert all(map(torch.equal, results[:2], got[0][:2])), "ranks must be bit-equal"
    for which in (3, 4):
        whole = torch.cat([results[which] for results in got])
        assert_close(whole, wanted[which], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunk_size", [1, 3, 0])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ranks_equal_one_process(ranks, tp, chunk_size):
    # Ten tokens in 16 columns: at tp 4 the ranks have 4, 4, 2 and 0 real columns.
    assert_ranks_equal_one_process(ranks(tp).run(step_on_world, chunk_size), one_process())


@pytest.mark.parametrize("needed_T", [NEEDED_T, torch.zeros_like(NEEDED_T)], ids=["some", "none"])
def test_positions_not_needed(ranks, needed_T):
    got = ranks(2).run(step_on_world, 1, needed_T=needed_T)
    assert_ranks_equal_one_process(got, one_process(needed_T))


def test_the_group_is_the_argument_not_the_world(ranks):
    got = ranks(4).run(step_on_two_groups)
    assert_ranks_equal_one_process(got[0::2], one_process())
    assert_ranks_equal_one_process(got[1::2], one_process())


@pytest.mark.parametrize("tp", [2, 4])
def test_logits_on_ranks_equal_one_process(ranks, tp):
    inputs = whole_inputs(1)
    inputs["bias_V"] = torch.zeros_like(inputs["bias_V"])
    logits_TV = (inputs["hidden_TD"] @ inputs["weight_VD"].T).detach().requires_grad_()
    found = full_logits_logprobs(
        logits_TV,
        torch.eye(16).double(),
        inputs["labels_T"],
        vocab_size=VOCAB_SIZE,
        temperature=0.7,
    )
    (wanted_TV,) = torch.autograd.grad(weighted_sum(found), logits_TV)
    got = ranks(tp).run(step_from_logits)
    for results in got:
        assert_close(results[0], found.logprobs.detach(), rtol=1e-10, atol=1e-12)
        assert_close(results[1], found.entropy.detach(), rtol=1e-10, atol=1e-12)
    grad_TV = torch.cat([results[2] for results in got], dim=1)
    assert_close(grad_TV, wanted_TV, rtol=1e-10, atol=1e-12)
