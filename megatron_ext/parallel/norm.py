"""Norms whose weights are told that they see a part of the sequence.

Under sequence parallelism each tensor-parallel rank normalises its own tokens, so the gradient of
the norm's weight is a partial sum; Megatron adds up the gradients of parameters that carry
``sequence_parallel = True``.  Its own torch norm refuses sequence parallelism instead.
With a residual stream in fp32 they are where its values become those of the weights' precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019) in fp32, [..., D] -> [..., D]."""

    def __init__(self, hidden_size: int, *, eps: float, zero_centered: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.zeros(hidden_size) if zero_centered else torch.ones(hidden_size)
        )
        self.eps = eps
        self.zero_centered = zero_centered

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension; the result has the weight's type."""
        weight = self.weight.float() + 1 if self.zero_centered else self.weight.float()
        result = functional.rms_norm(x.float(), weight.shape, weight, self.eps)
        return result.to(self.weight.dtype)


class LayerNorm(nn.Module):
    """Layer norm (Ba et al. 2016) in fp32, [..., D] -> [..., D]."""

    def __init__(self, hidden_size: int, *, eps: float, zero_centered: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.zeros(hidden_size) if zero_centered else torch.ones(hidden_size)
        )
        self.bias = nn.Parameter(torch.zeros(hidden_size))
        self.eps = eps
        self.zero_centered = zero_centered

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension; the result has the weight's type."""
        weight = self.weight.float() + 1 if self.zero_centered else self.weight.float()
        result = functional.layer_norm(x.float(), weight.shape, weight, self.bias.float(), self.eps)
        return result.to(self.weight.dtype)


class SequenceParallelNorm:
    """Builds the norm a configuration asks for (``normalization``: RMSNorm or LayerNorm).

    The call is Megatron's norm protocol: ``(config, hidden_size, eps)``.

    Raises:
        ValueError: another ``--normalization``.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> nn.Module:  # type: ignore[misc]
        classes = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
        if config.normalization not in classes:
            raise ValueError(
                f"--normalization {config.normalization} has no local implementation: use RMSNorm "
                "or LayerNorm, or --transformer-impl transformer_engine on a GPU."
            )
        norm = classes[config.normalization](
            hidden_size, eps=eps, zero_centered=config.layernorm_zero_centered_gamma
        )
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm
