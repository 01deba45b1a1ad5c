"""Inputs of the comparisons with full logits, and everything that must agree."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.logprobs.vocab_parallel import LogProbs


def random_inputs(
    num_tokens: int, *, width: int, columns: int, vocab_size: int, dtype: torch.dtype, seed: int = 0
) -> dict[str, Tensor]:
    """Leaves hidden_TD, weight_VD and bias_V that want gradients, and labels_T below vocab_size."""
    rng = torch.Generator().manual_seed(seed)

    def leaf(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=rng, dtype=torch.float64)
        return values.to(dtype).requires_grad_()

    return {
        "hidden_TD": leaf(num_tokens, width),
        "weight_VD": leaf(columns, width),
        "bias_V": leaf(columns),
        "labels_T": torch.randint(vocab_size, (num_tokens,), generator=rng),
    }


def weighted_sum(found: LogProbs) -> Tensor:
    """A loss that gives every log-probability and entropy a gradient of its own."""
    weight_T = torch.linspace(-1, 2, len(found.logprobs), dtype=found.logprobs.dtype)
    loss = (weight_T * found.logprobs).sum()
    if found.entropy is not None:
        loss = loss + (weight_T.flip(0).square() * found.entropy).sum()
    return loss


def values_and_gradients(found: LogProbs, leaves: list[Tensor]) -> list[Tensor]:
    """Everything two ways to compute the same must agree on."""
    values = [x.detach() for x in found if x is not None]
    return values + list(torch.autograd.grad(weighted_sum(found), leaves))
