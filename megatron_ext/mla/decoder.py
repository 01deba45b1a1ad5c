"""What surrounds attention in a dense decoder layer, straight from a checkpoint's tensors.

For `sequential`, which runs a calibration text through a stack that is half converted.  One layer's
weights are held at a time, float32.
Not covered: mixture-of-experts layers (`conversion_problems` refuses them there).

Legend: S sequences of T tokens, D model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.mla.forward import normalised
from megatron_ext.weights.checks import Checkpoint
from megatron_ext.weights.operators import Block


class DenseDecoder:
    """Embedding, norms and feed-forward layers of a checkpoint."""

    def __init__(self, source: Checkpoint) -> None:
        self._source = source
        self._epsilon = source.architecture.norm_epsilon

    def embedded(self, tokens_ST: Tensor) -> Tensor:
        """Hidden states [S, T, D] before the first layer."""
        return self._tensor("model.embed_tokens.weight")[tokens_ST]

    def inputs(self, layer: int, hidden_STD: Tensor) -> Tensor:
        """Normalised inputs of a layer's attention."""
        return self._norm(f"model.layers.{layer}.input_layernorm.weight", hidden_STD)

    def advance(self, layer: int, hidden_STD: Tensor, outputs_STD: Tensor) -> Tensor:
        """Hidden states behind a layer, from those before it and its attention's outputs."""
        prefix = f"model.layers.{layer}."
        hidden_STD = hidden_STD + outputs_STD
        x_STD = self._norm(f"{prefix}post_attention_layernorm.weight", hidden_STD)
        gate, up, down = (
            (self._tensor(f"{prefix}mlp.{name}_proj.weight"), self._bias(f"{prefix}mlp.{name}"))
            for name in ("gate", "up", "down")
        )
        parts = []
        for x_TD in x_STD:  # one sequence at a time: the feed-forward layer is wide
            parts.append(F.linear(F.silu(F.linear(x_TD, *gate)) * F.linear(x_TD, *up), *down))
        return hidden_STD + torch.stack(parts)

    def logits(self, hidden_STD: Tensor) -> Tensor:
        """[S, T, V] behind the last layer."""
        is_tied = self._source.architecture.tied
        output = self._tensor("model.embed_tokens.weight" if is_tied else "lm_head.weight")
        return F.linear(self._norm("model.norm.weight", hidden_STD), output)

    def _norm(self, name: str, hidden_STD: Tensor) -> Tensor:
        return normalised(hidden_STD, epsilon=self._epsilon) * self._tensor(name)

    def _bias(self, name: str) -> Tensor | None:
        full = f"{name}_proj.bias"
        return self._tensor(full) if full in self._source.source.tensors else None

    def _tensor(self, name: str) -> Tensor:
        info = self._source.source.tensors[name]
        values = self._source.source.read(Block(name=name, rows=slice(0, info.shape[0])))
        return values.float().clone()
