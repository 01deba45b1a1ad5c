"""The shape of a decoder-only transformer as its checkpoint describes it, in one vocabulary.

Every family's config.json is read into this value (`config_json`); the family's table, Megatron's
arguments and the checks are derived from it.  Sizes are of the whole model, never of a shard.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megatron_ext.weights.operators import Shape


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding: ``kind`` is Hugging Face's ``rope_type``."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    """Yarn's scale of cosine and sine; 0 = not given."""
    mscale_all_dim: float = 0.0
    """Yarn's scale of the softmax; 0 = not given."""
    attention_factor: float = 0.0
    """Scale of cosine and sine given outright; 0 = derived from the factor."""
    is_truncated: bool = True
    """Whether yarn rounds the borders of its ramp to whole dimensions."""
    rotated_share: float = 1.0
    """Share of each head that is rotated."""
    is_interleaved: bool = False
    """Whether neighbours form a rotated pair, as in multi-latent attention; else halves do."""

    @property
    def yarn_scale(self) -> float:
        """Yarn's factor on cosine and sine where none is given outright (Peng et al. 2023,
        equation 22; DeepSeek's extension)."""

        def scale(weight: float) -> float:
            return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

        if self.mscale and self.mscale_all_dim:
            return scale(self.mscale) / scale(self.mscale_all_dim)
        return scale(1.0)


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Groups of experts, of which a token's best few are chosen before its experts."""

    num_groups: int
    top_groups: int
    score_experts: int
    """A group's score is the sum of its best so many experts."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The mixture-of-experts layers and how tokens are routed in them."""

    num_experts: int
    top_k: int
    ffn_size: int
    sparse_layers: tuple[bool, ...]
    """For every layer, whether it has experts."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    is_normalised: bool
    """Whether the weights of a token's experts are divided by their sum."""
    scale: float = 1.0
    """Factor on the weights, after the division."""
    groups: Groups | None = None
    """None = all experts can be chosen together."""
    has_bias: bool = False
    """Whether a bias is added to the scores for the choice of experts only."""
    shared_ffn_size: int = 0
    """Width of the experts that every token passes; 0 = none."""


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-latent attention: ranks of the latents and sizes of a head."""

    query_rank: int
    """0 = queries are projected directly."""
    kv_rank: int
    plain_size: int
    """Part of a query or key head without position."""
    rotary_size: int
    """Part of a query or key head that is rotated; one such key is shared by all heads."""
    value_size: int


MlaLayout = Literal["paper", "deepseek"]
"""Rotary keys of converted attention: each KV head keeps its own, or all share one."""


@dataclass(frozen=True, kw_only=True)
class Converted:
    """Latent attention that `megatron_ext.mla` has made of the family's own."""

    layout: MlaLayout
    num_pairs: int
    """Rotary pairs of each rotary key."""
    rank: int
    """Of the latent of keys and values."""
    query_rank: int = 0
    """Of a latent of queries; 0 = none."""

    @property
    def rotary_width(self) -> int:
        """Widths of a rotary key."""
        return 2 * self.num_pairs

    def plain_width(self, head_size: int) -> int:
        """Of a head's key; a shared rotary key leaves the heads' own keys whole."""
        return head_size - self.rotary_width if self.layout == "paper" else head_size

    def num_rotary_keys(self, num_groups: int) -> int:
        """One for each KV head, or one for all."""
        return num_groups if self.layout == "paper" else 1

    def query_scale(self, head_size: int) -> float:
        """Factor on the logits: one over the root of a query's widths."""
        return (self.rotary_width + self.plain_width(head_size)) ** -0.5


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """All that decides which tensors a model has and what it computes with them."""

    family: str
    """Hugging Face's ``model_type``."""
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_groups: int
    """Key/value heads."""
    head_size: int
    vocab_size: int
    max_positions: int
    norm_epsilon: float
    activation: str
    tied: bool
    """Whether the output layer is the embedding."""
    rope: Rope
    qkv_bias: bool = False
    output_bias: bool = False
    """Bias of the attention's output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int = 0
    """Positions each position sees, in any layer; 0 = all before it."""
    attention_dropout: float = 0.0
    experts: Experts | None = None
    latent: Latent | None = None
    converted: Converted | None = None
    """What the family's attention was converted to; its traits above stay those of the original."""

    @property
    def untied(self) -> bool:
        """Whether the output layer has a weight of its own."""
        return not self.tied

    @property
    def sparse_layers(self) -> tuple[bool, ...]:
        """For every layer, whether it has experts."""
        return self.experts.sparse_layers if self.experts else (False,) * self.num_layers

    @property
    def expert_bias(self) -> bool:
        """Whether routers have a bias for the choice of experts."""
        return self.experts is not None and self.experts.has_bias

    @property
    def shared_experts(self) -> bool:
        """Whether every token passes through shared experts as well."""
        return self.experts is not None and self.experts.shared_ffn_size > 0

    @property
    def query_latent(self) -> bool:
        """Whether queries come from a latent too."""
        return self.latent is not None and self.latent.query_rank > 0

    @property
    def direct_query(self) -> bool:
        """Whether multi-latent attention projects its queries directly."""
        return self.latent is not None and self.latent.query_rank == 0

    @property
    def converted_query_latent(self) -> bool:
        """Whether converted attention makes its queries from a latent."""
        return self.converted is not None and self.converted.query_rank > 0

    @property
    def converted_output_bias(self) -> bool:
        """Whether converted attention has a bias of the output: a bias of values becomes one."""
        return self.qkv_bias or self.output_bias

    def shape(self, *names: str) -> Shape:
        """Sizes by name: a field, or one of the derived sizes below."""
        sizes = self._derived_sizes()
        return tuple(sizes[name] if name in sizes else getattr(self, name) for name in names)

    def _derived_sizes(self) -> dict[str, int]:
        sizes = {"attention_size": self.num_heads * self.head_size}
        if self.experts:
            sizes |= {
                "num_experts": self.experts.num_experts,
                "expert_ffn_size": self.experts.ffn_size,
                "shared_ffn_size": self.experts.shared_ffn_size,
            }
        if self.latent:
            head = self.latent.plain_size + self.latent.rotary_size
            sizes |= {
                "query_rank": self.latent.query_rank,
                "kv_rank": self.latent.kv_rank,
                "kv_down_size": self.latent.kv_rank + self.latent.rotary_size,
                "query_size": self.num_heads * head,
                "kv_up_size": self.num_heads * (self.latent.plain_size + self.latent.value_size),
                "attention_size": self.num_heads * self.latent.value_size,
            }
        if self.converted:
            found, groups = self.converted, self.num_groups
            key_width = found.rotary_width + found.plain_width(self.head_size)
            num_keys = found.num_rotary_keys(groups)
            sizes |= {
                "key_width": key_width,
                "num_rotary_keys": num_keys,
                "num_pairs": found.num_pairs,
                "rotary_size": num_keys * found.rotary_width,
                "query_rank": found.query_rank,
                "query_input": found.query_rank or self.hidden_size,
                "query_size": self.num_heads * key_width,
                "kv_rank": found.rank,
                "kv_down_size": found.rank + num_keys * found.rotary_width,
                "kv_up_size": groups * (found.plain_width(self.head_size) + self.head_size),
            }
        return sizes
