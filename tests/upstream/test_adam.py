"""The stand-in for fused Adam: torch.optim's updates, the fused state layout, exact resumption."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from megatron_ext.upstream.adam import GroupStepAdam

SHAPES = ((3, 4), (5,), ())
ROUNDING = {"rtol": 1e-13, "atol": 1e-15}  # float64; only the order of a few operations may differ


def parameters(seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Random parameters of several shapes."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in SHAPES
    ]


def descend(optimizers: list[torch.optim.Optimizer], *, steps: int, seed: int = 1) -> None:
    """The same random gradients for the parameters of every optimizer."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = [[p for group in o.param_groups for p in group["params"]] for o in optimizers]
        for same in zip(*rows, strict=True):
            scale = 10 ** float(torch.empty(1).uniform_(-4, 1, generator=generator))
            gradient = torch.randn(same[0].shape, generator=generator, dtype=same[0].dtype) * scale
            for parameter in same:
                parameter.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()


@settings(max_examples=25, deadline=None)
@given(
    decoupled=st.booleans(),
    lr=st.floats(1e-5, 1.0),
    betas=st.tuples(st.floats(0, 0.999), st.floats(0, 0.9999)),
    eps=st.floats(1e-10, 1e-2),
    weight_decay=st.sampled_from([0.0, 0.01, 0.5]),
)
def test_updates_are_those_of_torch(decoupled, lr, betas, eps, weight_decay):
    ours, theirs = parameters(), parameters()
    reference = torch.optim.AdamW if decoupled else torch.optim.Adam
    common = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    descend(
        [
            GroupStepAdam(ours, adam_w_mode=decoupled, **common),
            reference(theirs, **common, foreach=False),
        ],
        steps=8,
    )
    assert_close(ours, theirs, **ROUNDING)


def test_groups_keep_their_own_values():
    ours, theirs = parameters(), parameters()
    groups = [
        [{"params": p[:1], "weight_decay": 0.3}, {"params": p[1:], "lr": 0.1}]
        for p in (ours, theirs)
    ]
    descend([GroupStepAdam(groups[0]), torch.optim.AdamW(groups[1], weight_decay=0.0)], steps=5)
    assert_close(ours, theirs, **ROUNDING)


def test_without_bias_correction_the_first_step_is_the_raw_moments():
    parameter = torch.ones(2, dtype=torch.float64, requires_grad=True)
    parameter.grad = torch.tensor([1.0, -2.0], dtype=torch.float64)
    GroupStepAdam([parameter], lr=0.1, bias_correction=False, eps=0.0).step()
    ratio = 0.1 / 0.001**0.5  # (1 - beta1) g / sqrt((1 - beta2) g^2)
    assert_close(parameter.detach(), 1 - 0.1 * ratio * torch.tensor([1.0, -1.0]).double())


def test_the_state_is_laid_out_as_fused_adam_does():
    ours = parameters()
    optimizer = GroupStepAdam([{"params": ours}, {"params": []}])
    descend([optimizer], steps=3)
    state = optimizer.state_dict()
    assert [group["step"] for group in state["param_groups"]] == [3, 3]  # the empty group counts
    assert all(values.keys() == {"exp_avg", "exp_avg_sq"} for values in state["state"].values())
    assert len(state["state"]) == len(SHAPES)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_saved_loaded_and_continued_equals_uninterrupted(dtype):
    ours = parameters(dtype=dtype)
    optimizer = GroupStepAdam(ours, lr=0.01, weight_decay=0.1)
    descend([optimizer], steps=3)
    resumed = [p.detach().clone().requires_grad_() for p in ours]
    other = GroupStepAdam(resumed, lr=0.5)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    descend([optimizer, other], steps=3, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(ours, resumed, strict=True))


def test_a_parameter_without_gradient_stays_and_gets_no_state():
    trained, frozen = parameters()[:2]
    before = frozen.detach().clone()
    optimizer = GroupStepAdam([trained, frozen], weight_decay=0.1)
    trained.grad = torch.ones_like(trained)
    optimizer.step()
    assert torch.equal(frozen, before)
    assert list(optimizer.state) == [trained]


def test_a_closure_is_run_with_gradients_and_its_loss_returned():
    parameter = torch.tensor([3.0, -2.0], dtype=torch.float64, requires_grad=True)
    optimizer = GroupStepAdam([parameter], lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (parameter**2).sum()
        loss.backward()
        return loss.item()

    losses = [optimizer.step(closure) for _ in range(50)]
    assert losses[0] == 13.0
    assert losses[-1] < 0.1 * losses[0]


def test_cuda_graphs_are_refused():
    with pytest.raises(ValueError, match="--optimizer-cuda-graph"):
        GroupStepAdam(parameters(), capturable=True)
