"""One attention layer before and after its conversion, as values.

`AttentionLayer` is what a checkpoint has: multi-head, grouped-query or multi-query attention with
RoPE.  `LatentLayer` is what both layouts become: per token it keeps rotary keys (one for each KV
head in the layout `paper`, one for all in `deepseek`) and a latent, from which plain keys and
values are made.  Its rotary widths are in halves: the first K real, the last K imaginary parts.

Legend: D model, H query heads, G KV heads, W width of a head, K rotary pairs, C = 2 K their widths,
B rotary keys (G or 1), N plain widths of a key, V widths of a value, R latent, E what queries are
made from (D, or the query latent).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_ext.mla.rotary_pairs import RotaryPairs, rotary_pairs
from megatron_ext.weights.architecture import Architecture


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """Original attention; weights are (out, in) by head, as in a checkpoint of Hugging Face.

    The rotary scale of YaRN is already part of the queries (`of` puts it there).
    """

    pairs: RotaryPairs
    query_HWD: Tensor
    key_GWD: Tensor
    value_GVD: Tensor
    output_DHV: Tensor
    query_bias_HW: Tensor | None = None
    key_bias_GW: Tensor | None = None
    value_bias_GV: Tensor | None = None
    output_bias_D: Tensor | None = None
    query_norm_W: Tensor | None = None
    """Weight of the norm of each query head, before RoPE; None = no norm."""
    key_norm_W: Tensor | None = None
    norm_epsilon: float = 0.0

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Tensor],
        architecture: Architecture,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> AttentionLayer:
        """From a layer's tensors by their names in `self_attn` ("q_proj.weight", ...).

        Raises:
            ValueError: the attention is latent already, or its rotary embedding is not known.
        """
        if architecture.latent is not None:
            raise ValueError(
                f"{architecture.family} has latent attention already: there is nothing to convert."
            )
        pairs = rotary_pairs(architecture.rope, head_size=architecture.head_size)
        found = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        heads = {"q": architecture.num_heads}

        def of_heads(name: str, kind: str) -> Tensor | None:
            value = found.get(f"{name}_proj.{kind}")
            count = heads.get(name, architecture.num_groups)
            return None if value is None else value.unflatten(0, (count, -1))

        query_HWD, key_GWD, value_GVD = (of_heads(name, "weight") for name in "qkv")
        assert query_HWD is not None and key_GWD is not None and value_GVD is not None
        layer = cls(
            pairs=pairs,
            query_HWD=query_HWD,
            key_GWD=key_GWD,
            value_GVD=value_GVD,
            output_DHV=found["o_proj.weight"].unflatten(1, (architecture.num_heads, -1)),
            query_bias_HW=of_heads("q", "bias"),
            key_bias_GW=of_heads("k", "bias"),
            value_bias_GV=of_heads("v", "bias"),
            output_bias_D=found.get("o_proj.bias"),
            query_norm_W=found.get("q_norm.weight"),
            key_norm_W=found.get("k_norm.weight"),
            norm_epsilon=architecture.norm_epsilon,
        )
        return layer._with_rotary_scale_in_queries()

    @property
    def num_groups(self) -> int:
        """G."""
        return len(self.key_GWD)

    @property
    def heads_per_group(self) -> int:
        """H / G."""
        return len(self.query_HWD) // len(self.key_GWD)

    @property
    def softmax_scale(self) -> float:
        """Factor on the logits."""
        return self.pairs.head_size**-0.5

    @property
    def has_qk_norm(self) -> bool:
        """Whether queries and keys are normalised before RoPE."""
        return self.query_norm_W is not None

    def _with_rotary_scale_in_queries(self) -> AttentionLayer:
        """The same attention with a rotary scale of 1."""
        if self.pairs.scale == 1.0:
            return self
        factor_W = torch.full_like(self.query_HWD[0, :, 0], self.pairs.scale**2)
        factor_W[self.pairs.plain] = 1.0
        pairs = replace(self.pairs, scale=1.0)
        if self.query_norm_W is not None:
            return replace(self, pairs=pairs, query_norm_W=self.query_norm_W * factor_W)
        bias_HW = None if self.query_bias_HW is None else self.query_bias_HW * factor_W
        query_HWD = self.query_HWD * factor_W[:, None]
        return replace(self, pairs=pairs, query_HWD=query_HWD, query_bias_HW=bias_HW)


@dataclass(frozen=True, kw_only=True)
class LatentNorms:
    """Weights of the norms of queries and keys, in the order of a latent layer's widths.

    Each head is divided by the root mean square of all its C + N widths, before RoPE.  The rotary
    part of a key is cached normalised; with absorbed keys the divisor of each KV head is cached.
    """

    query_rotary_GC: Tensor
    query_plain_GN: Tensor
    key_rotary_GC: Tensor
    key_plain_GN: Tensor
    epsilon: float


@dataclass(frozen=True, kw_only=True)
class LatentLayer:
    """Converted attention.

    The logit of head h (group g, rotary key b) is softmax_scale * (turned query_rotary . turned
    key_rotary + query_plain . key_up latent), its output the sum of value_up latent.
    """

    query_rotary_HCE: Tensor
    query_plain_HNE: Tensor
    query_down_ED: Tensor | None = None
    """None = queries are made from the hidden states."""
    key_rotary_BCD: Tensor
    frequencies_BK: Tensor
    """Radians per position of every rotary pair, float32; saved with the weights."""
    down_RD: Tensor
    key_up_GNR: Tensor
    value_up_GVR: Tensor
    output_DHV: Tensor
    query_rotary_bias_HC: Tensor | None = None
    query_plain_bias_HN: Tensor | None = None
    key_rotary_bias_BC: Tensor | None = None
    output_bias_D: Tensor | None = None
    norms: LatentNorms | None = None
    softmax_scale: float

    @property
    def rank(self) -> int:
        """R."""
        return len(self.down_RD)

    @property
    def num_pairs(self) -> int:
        """K."""
        return self.frequencies_BK.shape[1]

    def to(self, dtype: torch.dtype) -> LatentLayer:
        """The same layer with weights of another type; frequencies stay as they are."""

        def moved(value: object, name: str) -> object:
            if isinstance(value, LatentNorms):
                return LatentNorms(**{n: moved(v, n) for n, v in vars(value).items()})  # pyright: ignore
            if isinstance(value, Tensor) and name != "frequencies_BK":
                return value.to(dtype)
            return value

        return LatentLayer(**{name: moved(value, name) for name, value in vars(self).items()})  # pyright: ignore
