"""How large a converted model's cache is, and everything about it that does not fit together.

The latent is the same for all heads, so tensor-parallel ranks do not divide it, while they divide
KV heads: at many ranks a latent can take more of each than what it replaces.
Invariant the tests check: the numbers are those of the tensors that a converted layer caches.

Legend: G KV heads, W width of a head, K rotary pairs, R latent.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.mla.config import CALIBRATED_STRATEGIES, MLAConfig
from megatron_ext.mla.layers import LatentLayer
from megatron_ext.mla.rotary_pairs import rotary_pairs
from megatron_ext.mla.selection import check_kept, pairs_by_rule
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


def conversion_problems(
    config: MLAConfig,
    architecture: Architecture,
    *,
    max_length: int | None = None,
    tp_size: int = 1,
) -> list[str]:
    """Every reason against a conversion as one sentence with its remedy; empty if there is none.

    max_length: of the sequences that are wanted; None = as long as the checkpoint claims.
    """
    if architecture.latent is not None:
        return [f"{architecture.family} has latent attention already: there is nothing to convert."]
    return [
        *_value_problems(config),
        *_model_problems(architecture, max_length=max_length, tp_size=tp_size),
        *_rotary_problems(config, architecture),
        *_rank_problems(config, architecture),
        *_norm_problems(config, architecture),
    ]


def conversion_notices(
    config: MLAConfig, architecture: Architecture, *, tp_size: int = 1
) -> list[str]:
    """What a user should know of a conversion that is possible."""
    before = original_cache(architecture).on_rank(tp_size=tp_size)
    after = converted_cache(config, architecture).on_rank(tp_size=tp_size)
    if after < before:
        return []
    return [
        f"with --tensor-model-parallel-size {tp_size} the latent cache takes {after} numbers per "
        f"token and layer on each rank, the original {before}: ranks divide KV heads, but not the "
        "latent. Use fewer tensor-parallel ranks, or a smaller --kv-rank."
    ]


def _value_problems(config: MLAConfig) -> list[str]:
    wrong = []
    positive = (
        "kv_rank kv_dims_per_head cache_ratio q_rank rope_fold query_refit_steps refit_ridge "
        "moment_ridge metric_ridge calibration_kept calibration_queries rope_uniform_start"
    )
    for name in positive.split():
        if not getattr(config, name) >= 0:
            wrong.append(f"{_flag(name)} {getattr(config, name)} is negative: use 0 or more.")
    for name in ("rope_stride", "calibration_tokens", "calibration_context"):
        if getattr(config, name) < 1:
            wrong.append(f"{_flag(name)} {getattr(config, name)} must be at least 1.")
    for name in ("token_weight", "metric_exponent"):
        if not 0 <= getattr(config, name) <= 1:
            wrong.append(f"{_flag(name)} {getattr(config, name)} must be from 0 to 1.")
    if not config.kv_balance_factor > 0:
        wrong.append(f"--kv-balance-factor {config.kv_balance_factor} must be above 0.")
    if not config.whitening:
        wrong += [
            f"{_flag(name)} {getattr(config, name)} looks at activations, and --no-whitening does "
            f"not. Use {_flag(name)} 0."
            for name in ("token_weight", "metric_exponent")
            if getattr(config, name)
        ]
    return wrong


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _model_problems(
    architecture: Architecture, *, max_length: int | None, tp_size: int
) -> list[str]:
    wrong = []
    length = architecture.max_positions if max_length is None else max_length
    window = architecture.sliding_window
    if 0 < window < length:
        wrong.append(
            f"sliding_window {window}: sliding windows are not built, and sequences of {length} "
            f"positions need one. Use a context of {window} or less."
        )
    if architecture.num_groups % tp_size:
        wrong.append(
            f"--tensor-model-parallel-size {tp_size} does not divide the {architecture.num_groups} "
            "KV heads, whose keys and values are made on the ranks. Use a size that does."
        )
    return wrong


def _rotary_problems(config: MLAConfig, architecture: Architecture) -> list[str]:
    try:
        count = rotary_pairs(architecture.rope, head_size=architecture.head_size).count
        check_kept(config.rope_pairs, num_pairs=count)
        if config.rope_strategy == "uniform" and config.mla_layout == "paper":
            start = config.rope_uniform_start
            pairs_by_rule("uniform", num_pairs=count, kept=config.rope_pairs, start=start)
    except ValueError as error:
        return [str(error)]
    if config.mla_layout == "paper":
        flags = [
            f for f, v in (("stride", config.rope_stride - 1), ("fold", config.rope_fold)) if v
        ]
        return [f"--rope-{flag} is of --mla-layout deepseek, where heads share." for flag in flags]
    wrong = []
    if config.rope_strategy not in CALIBRATED_STRATEGIES:
        wrong.append(
            f"--rope-strategy {config.rope_strategy} with --mla-layout deepseek: the frequencies "
            "of a shared key follow from --rope-pairs and --rope-stride. Use residual or 2-norm."
        )
    if config.rope_pairs * config.rope_stride > count:
        wrong.append(
            f"--rope-pairs {config.rope_pairs} with --rope-stride {config.rope_stride} covers more "
            f"than the {count} rotary pairs of a head. Use {count // config.rope_stride} pairs or "
            "less."
        )
    return wrong


def _rank_problems(config: MLAConfig, architecture: Architecture) -> list[str]:
    given = [n for n in ("kv_rank", "kv_dims_per_head", "cache_ratio") if getattr(config, n)]
    if len(given) != 1:
        names = " and ".join(_flag(name) for name in given) or "none"
        return [
            f"the size of the latent is given by {names}: give exactly one of --kv-rank, "
            "--kv-dims-per-head and --cache-ratio."
        ]
    rank, name = latent_rank(config, architecture), given[0]
    what = f"{_flag(name)} {getattr(config, name):g}"
    before, width = original_cache(architecture).total, architecture.head_size
    if rank < 1 + config.kv_split:
        return [
            f"{what} leaves {rank} numbers of the latent beside {config.rope_pairs} rotary pairs. "
            "Use a larger ratio or fewer --rope-pairs."
        ]
    dropped = 0 if config.mla_layout == "deepseek" else 2 * config.rope_pairs
    rows = architecture.num_groups * (2 * width - dropped)
    limit = min(rows, architecture.hidden_size)
    if rank > limit:
        return [
            f"{what} makes a latent of {rank} numbers, but keys and values have a rank of {limit} "
            f"at most. Use --kv-rank {limit} or less."
        ]
    after = converted_cache(config, architecture).total
    if after > before:
        return [
            f"{what} with --rope-pairs {config.rope_pairs} makes a cache of {after} numbers per "
            f"token and layer, and the original has {before}: nothing is saved. Use less of both."
        ]
    return []


def _norm_problems(config: MLAConfig, architecture: Architecture) -> list[str]:
    """What normalised queries and keys cannot express."""
    if not architecture.qk_norm:
        return []
    if config.mla_layout == "deepseek":
        return [
            f"{architecture.family} normalises queries and keys by head (qk-norm), so heads cannot "
            "share a rotary key. Use --mla-layout paper."
        ]
    uses = {
        "--no-rope-compensation": config.is_compensated,
        "--query-refit-steps 0": config.query_refit_steps,
    }
    return [
        f"{architecture.family} normalises queries and keys by head (qk-norm), so queries cannot "
        f"be mixed. Use {flag}."
        for flag, is_used in uses.items()
        if is_used
    ]
