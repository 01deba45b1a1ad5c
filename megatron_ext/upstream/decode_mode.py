"""Running training chunks as they are for decoding, and giving them back as they were.

Decoding wants evaluation mode, no sequence parallelism (a step has too few tokens to split) and no
hooks that finish parameter all-gathers in forward (replicas decode different numbers of steps).
Invariant the tests check: after the block every module's mode, flags and hooks are what they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

_SEQUENCE_PARALLEL = (
    "sequence_parallel",
    "scatter_to_sequence_parallel",
    "reduce_scatter_embeddings",
)


@contextmanager
def decode_mode(chunks: Sequence[Any]) -> Iterator[None]:
    """Run the block with these chunks, wrapped by Megatron or bare, ready to decode.

    Collective over the data-parallel ranks where parameter all-gathers overlap with the forward.
    """
    with ExitStack() as stack:
        for chunk in chunks:
            if getattr(chunk, "use_forward_hook", False):
                chunk.disable_forward_pre_hook()
                stack.callback(chunk.enable_forward_pre_hook)
            stack.enter_context(_evaluation(chunk))
            stack.enter_context(_whole_sequences(chunk))
        stack.enter_context(torch.no_grad())
        yield


@contextmanager
def _evaluation(chunk: nn.Module) -> Iterator[None]:
    was_training = [module for module in chunk.modules() if module.training]
    chunk.eval()
    try:
        yield
    finally:
        for module in was_training:
            module.training = True


@contextmanager
def _whole_sequences(chunk: nn.Module) -> Iterator[None]:
    """Sequence parallelism off.

    Not Megatron's `set_model_to_sequence_parallel`: that switches on, when it restores, what was
    off before, and remembers modules by an address that another model may get later.
    """
    owners = {id(module): module for module in chunk.modules()}
    owners |= {id(m.config): m.config for m in chunk.modules() if hasattr(m, "config")}
    switched = [
        (owner, name)
        for owner in owners.values()
        for name in _SEQUENCE_PARALLEL
        if getattr(owner, name, None) is True
    ]
    for owner, name in switched:
        setattr(owner, name, False)
    try:
        yield
    finally:
        for owner, name in switched:
            setattr(owner, name, True)
