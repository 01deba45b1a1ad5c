"""Nothing of the size of all logits is ever allocated, and only a few numbers a token are kept."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ext.logprobs.chunked import selected_logprobs
from tests.logprobs.comparison import random_inputs, weighted_sum
from tests.references import full_logits_logprobs

NUM_TOKENS, WIDTH, VOCAB_SIZE = 512, 4, 1024


class LargestTensor(TorchDispatchMode):
    """Watches every operation below autograd and keeps the largest output, in elements."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


def inputs_and_leaves(dtype: torch.dtype = torch.float32) -> tuple[dict, list[torch.Tensor]]:
    sizes = {"width": WIDTH, "columns": VOCAB_SIZE, "vocab_size": VOCAB_SIZE}
    inputs = random_inputs(NUM_TOKENS, **sizes, dtype=dtype)
    return inputs, [inputs["hidden_TD"], inputs["weight_VD"], inputs["bias_V"]]


def test_the_watch_sees_full_logits():
    inputs, leaves = inputs_and_leaves()
    with LargestTensor() as largest:
        found = full_logits_logprobs(**inputs, vocab_size=VOCAB_SIZE)
        torch.autograd.grad(weighted_sum(found), leaves)
    assert largest.elements == NUM_TOKENS * VOCAB_SIZE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_size", [4, 32])
def test_no_tensor_is_larger_than_a_chunk(chunk_size, dtype):
    inputs, leaves = inputs_and_leaves(dtype)
    with LargestTensor() as largest:
        found = selected_logprobs(
            **inputs, vocab_size=VOCAB_SIZE, chunk_size=chunk_size, with_entropy=True
        )
        torch.autograd.grad(weighted_sum(found), leaves)
    statistics = 2 * 4 * NUM_TOKENS
    assert largest.elements <= max(chunk_size * VOCAB_SIZE, statistics, VOCAB_SIZE * WIDTH)
    assert chunk_size * VOCAB_SIZE < NUM_TOKENS * VOCAB_SIZE / 10


def test_backward_keeps_a_few_numbers_a_token():
    inputs, leaves = inputs_and_leaves()
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        selected_logprobs(**inputs, vocab_size=VOCAB_SIZE, chunk_size=4, with_entropy=True)
    of_leaves = sum(leaf.numel() for leaf in leaves)
    # Beside the inputs: the labels and four statistics.
    assert sum(kept.values()) == of_leaves + 5 * NUM_TOKENS
