"""How large a converted model's cache is, and which latents and rotary keys fit into one.

The latent is the same for all heads, so tensor-parallel ranks do not divide it, while they divide
KV heads: at many ranks a latent can take more of each than what it replaces.
Invariant the tests check: the numbers are those of the tensors that a converted layer caches.

Legend: G KV heads, W width of a head, K rotary pairs, R latent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_ext.mla.config import FOUND, MLAConfig
from megatron_ext.mla.layers import LatentLayer
from megatron_ext.mla.logit_residual import FOLD_STRIDE
from megatron_ext.weights.architecture import Architecture


@dataclass(frozen=True, kw_only=True)
class CacheSize:
    """Numbers that one layer caches of one token."""

    by_head: int
    """Divided over tensor-parallel ranks: rotary keys of KV heads, and their norms' divisors."""
    shared: int
    """On every tensor-parallel rank: the latent, and a rotary key that heads share."""

    @property
    def total(self) -> int:
        """Of one process."""
        return self.by_head + self.shared

    def on_rank(self, *, tp_size: int) -> int:
        """On each tensor-parallel rank; tp_size divides the KV heads."""
        return self.by_head // tp_size + self.shared

    def num_bytes(self, *, tp_size: int, num_layers: int, bytes_per_number: int = 2) -> int:
        """Of one token in all layers on each tensor-parallel rank, not quantised."""
        return self.on_rank(tp_size=tp_size) * num_layers * bytes_per_number


def original_cache(architecture: Architecture) -> CacheSize:
    """Keys and values of all KV heads: 2 G W."""
    return CacheSize(by_head=2 * architecture.num_groups * architecture.head_size, shared=0)


def converted_cache(config: MLAConfig, architecture: Architecture) -> CacheSize:
    """2 G K + R in the layout `paper` (and G with qk-norm), 2 K + R in `deepseek`."""
    rotary, rank = 2 * config.rope_pairs, latent_rank(config, architecture)
    if config.mla_layout == "deepseek":
        return CacheSize(by_head=0, shared=rotary + rank)
    per_head = rotary + (1 if architecture.qk_norm else 0)
    return CacheSize(by_head=architecture.num_groups * per_head, shared=rank)


def cache_of(layer: LatentLayer) -> CacheSize:
    """Of a converted layer: its rotary keys, their norms' divisors and its latent."""
    num_keys, width = layer.key_rotary_BCD.shape[:2]
    if num_keys == 1 and layer.norms is None:
        return CacheSize(by_head=0, shared=width + layer.rank)
    per_head = width + (0 if layer.norms is None else 1)
    return CacheSize(by_head=num_keys * per_head, shared=layer.rank)


def latent_rank(config: MLAConfig, architecture: Architecture) -> int:
    """R, by whichever of the three options is given."""
    if config.kv_rank:
        return config.kv_rank
    if config.kv_dims_per_head:
        return config.kv_dims_per_head * architecture.num_groups
    budget = round(config.cache_ratio * original_cache(architecture).total)
    heads = 1 if config.mla_layout == "deepseek" else architecture.num_groups
    scalars = architecture.num_groups if architecture.qk_norm else 0
    return budget - 2 * config.rope_pairs * heads - scalars


def rank_limit(config: MLAConfig, architecture: Architecture) -> int:
    """The rank of plain keys and values, above which a latent cannot be."""
    dropped = 0 if config.mla_layout == "deepseek" else 2 * config.rope_pairs
    rows = architecture.num_groups * (2 * architecture.head_size - dropped)
    return min(rows, architecture.hidden_size)


def divisions(config: MLAConfig, architecture: Architecture) -> list[MLAConfig]:
    """The config with every number of pairs, and stride, that leaves something for the latent."""
    pairs = [config.rope_pairs] if config.rope_pairs != FOUND else range(architecture.head_size)
    strides = [config.rope_stride] if config.rope_stride != FOUND else [1, FOLD_STRIDE]
    if config.mla_layout == "paper":
        strides = [1]
    count = int(architecture.head_size * architecture.rope.rotated_share) // 2
    found = []
    for stride in strides:
        for number in pairs:
            if number * stride <= count and _is_tried(number):
                choice = replace(config, rope_pairs=number, rope_stride=stride)
                if 1 <= latent_rank(choice, architecture) <= rank_limit(choice, architecture):
                    found.append(choice)
    return found


def _is_tried(number: int) -> bool:
    """Every number up to 8, every second to 16, every fourth to 32 and so on."""
    return number % max(1, (1 << number.bit_length()) // 8) == 0
