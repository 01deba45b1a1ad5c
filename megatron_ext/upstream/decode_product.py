"""Products of few tokens with large weights, from a copy that oneDNN has packed.

A CPU's matrix product reorders the whole weight at every call, which is a good part of the time
when there are only the tokens of a decoding step: of 32 tokens 1.2 to 1.4 times as fast without.
The copies last as long as the rollout, whose weights do not change, and take limited memory.
Invariant the tests check: equal to the plain product up to rounding.
Not covered: bf16, other devices, weights of fewer than a million numbers; they are multiplied as
they are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[[Tensor], Tensor]

LEAST_NUMBERS = 2**20
"""Smaller weights stay in the processor's cache, where reordering costs little."""
MOST_BYTES = 2**29
"""Of all copies of one rollout."""
_MOST_ROWS = 64
_PACKED_FOR_ROWS = 32
_FIRST_USES = 2
"""The call at which a weight is packed.  That costs as much as some five calls save, and nearly
every rollout has more."""


def plain_product(weight: Tensor, bias: Tensor | None = None) -> Function:
    """[T, in] -> [T, out]."""
    return lambda x: F.linear(x, weight, bias)


class PackedProducts:
    """Makes the products of one rollout."""

    def __init__(self, *, most_bytes: int = MOST_BYTES) -> None:
        """None so far.

        most_bytes: of all packed copies together; further weights are multiplied as they are.
        """
        self._bytes_left = most_bytes

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> Function:
        """[T, in] -> [T, out], under `torch.no_grad`."""
        if (
            weight.device.type != "cpu"
            or weight.dtype != torch.float32
            or weight.numel() < LEAST_NUMBERS
            or not torch.backends.mkldnn.is_available()
        ):
            return plain_product(weight, bias)
        return _PackedProduct(weight, bias, self._take)

    def _take(self, num_bytes: int) -> bool:
        """Whether there is memory for one more copy, which then counts."""
        if num_bytes > self._bytes_left:
            return False
        self._bytes_left -= num_bytes
        return True


class _PackedProduct:
    """One weight's product; packs it when it has been used often enough."""

    __slots__ = ("_bias", "_packed", "_take", "_uses", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, take: Callable[[int], bool]) -> None:
        self._weight, self._bias, self._take = weight, bias, take
        self._packed: Tensor | None = None
        self._uses = 0

    def __call__(self, x: Tensor) -> Tensor:
        if 1 < len(x) <= _MOST_ROWS:
            self._uses += 1
            if self._uses == _FIRST_USES and self._take(self._weight.nbytes):
                self._packed = torch.ops.mkldnn._reorder_linear_weight(
                    self._weight, _PACKED_FOR_ROWS
                )
            if self._packed is not None:
                return torch.ops.mkldnn._linear_pointwise(
                    x, self._packed, self._bias, "none", [], ""
                )
        return F.linear(x, self._weight, self._bias)
