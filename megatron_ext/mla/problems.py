"""Everything about a conversion's options and model that does not fit together, all at once.

Invariant the tests check: each mismatch is one sentence with flag, value, relation and remedy.
"""

from __future__ import annotations

from megatron_ext.mla.config import CALIBRATED_STRATEGIES, FOUND, MLAConfig
from megatron_ext.mla.rotary_pairs import rotary_pairs
from megatron_ext.mla.selection import check_kept, pairs_by_rule
from megatron_ext.mla.sizes import (
    converted_cache,
    divisions,
    latent_rank,
    original_cache,
    rank_limit,
)
from megatron_ext.weights.architecture import Architecture

SMALLEST_PUBLISHED = 0.125
"""Share of the original cache that the smallest conversions with published scores keep: table 1 of
MHA2MLA (arXiv 2502.14837), after training."""


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
        *_size_problems(config, architecture),
        *_norm_problems(config, architecture),
        *_sequential_problems(config, architecture),
        *_recalibration_problems(config),
    ]


def text_problems(config: MLAConfig) -> list[str]:
    """What is missing for a second pass; a file of statistics is not enough."""
    if not config.recalibrate or config.calibration_data:
        return []
    return [
        "--recalibrate (of --low-rank-method transmla) without --calibration-data: the text runs "
        "again through the model with partial rotation. Give the text, or use --no-recalibrate."
    ]


def conversion_notices(
    config: MLAConfig, architecture: Architecture, *, tp_size: int = 1
) -> list[str]:
    """What a user should know of a conversion that is possible."""
    return [
        *_small_notices(config, architecture),
        *_rank_notices(config, architecture, tp_size=tp_size),
    ]


def _small_notices(config: MLAConfig, architecture: Architecture) -> list[str]:
    before, after = original_cache(architecture).total, converted_cache(config, architecture).total
    if after / before >= SMALLEST_PUBLISHED:
        return []
    return [
        f"the cache is {after} of {before} numbers per token and layer, {after / before:.1%}: a "
        f"latent of {latent_rank(config, architecture)} for the keys and values of "
        f"{architecture.num_groups} KV heads of {architecture.head_size}, below the "
        f"{SMALLEST_PUBLISHED:.1%} of the smallest published conversion. Use a larger --kv-rank "
        "(with few KV heads more --kv-dims-per-head) unless much training follows."
    ]


def _rank_notices(config: MLAConfig, architecture: Architecture, *, tp_size: int) -> list[str]:
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
        if config.rope_pairs >= 0:
            check_kept(config.rope_pairs, num_pairs=count)
        if config.rope_strategy == "uniform" and config.rope_pairs >= 0:
            start = config.rope_uniform_start
            pairs_by_rule("uniform", num_pairs=count, kept=config.rope_pairs, start=start)
    except ValueError as error:
        return [str(error)]
    if config.mla_layout == "paper":
        flags = [
            flag
            for flag, is_given in (
                ("stride", config.rope_stride not in (FOUND, 1)),
                ("fold", config.rope_fold != 0),
            )
            if is_given
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


def _size_problems(config: MLAConfig, architecture: Architecture) -> list[str]:
    given = [n for n in ("kv_rank", "kv_dims_per_head", "cache_ratio") if getattr(config, n)]
    if len(given) != 1:
        names = " and ".join(_flag(name) for name in given) or "none"
        return [
            f"the size of the latent is given by {names}: give exactly one of --kv-rank, "
            "--kv-dims-per-head and --cache-ratio."
        ]
    if config.rope_pairs == FOUND:
        return _division_problems(config, architecture, given=given[0])
    return _rank_problems(config, architecture, name=given[0])


def _division_problems(config: MLAConfig, architecture: Architecture, *, given: str) -> list[str]:
    """Of pairs that are to be found."""
    if given != "cache_ratio":
        return [
            f"{_flag(given)} without --rope-pairs: only a --cache-ratio can be divided between "
            "rotary pairs and latent. Give --rope-pairs."
        ]
    if divisions(config, architecture):
        return []
    return [
        f"--cache-ratio {config.cache_ratio:g} leaves no possible latent beside any number of "
        "rotary pairs. Use a larger ratio, and below 1."
    ]


def _rank_problems(config: MLAConfig, architecture: Architecture, *, name: str) -> list[str]:
    rank = latent_rank(config, architecture)
    what = f"{_flag(name)} {getattr(config, name):g}"
    before, limit = original_cache(architecture).total, rank_limit(config, architecture)
    if rank < 1 + config.kv_split:
        return [
            f"{what} leaves {rank} numbers of the latent beside {config.rope_pairs} rotary pairs. "
            "Use a larger ratio or fewer --rope-pairs."
        ]
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


def _sequential_problems(config: MLAConfig, architecture: Architecture) -> list[str]:
    """Of layers that are fitted to what converted ones leave."""
    if not config.sequential_compensation:
        return []
    flag, wrong = "--sequential-compensation", []
    if architecture.experts is not None:
        wrong.append(
            f"{flag} with the experts of a {architecture.family}: it runs the layers behind "
            "converted ones itself, and only dense ones. Leave it out."
        )
    if not config.calibration_data:
        wrong.append(
            f"{flag} without --calibration-data: statistics of the original model are not enough. "
            "Give the text."
        )
    if FOUND in (config.rope_pairs, config.rope_stride if config.mla_layout == "deepseek" else 0):
        wrong.append(
            f"{flag} with rotary pairs that are to be found: convert without it first, and give "
            "the --rope-pairs and --rope-stride of that report."
        )
    return wrong


def _recalibration_problems(config: MLAConfig) -> list[str]:
    """Of a second pass over the calibration text."""
    if not config.recalibrate:
        return []
    wrong = []
    for flag, is_given, remedy in (
        ("--no-whitening", not config.whitening, "Leave it out"),
        (f"--token-weight {config.token_weight:g}", config.token_weight, "Use --token-weight 0"),
        ("--sequential-compensation", config.sequential_compensation, "Leave it out"),
    ):
        if is_given:
            wrong.append(
                f"{flag} with --recalibrate, which takes plain second moments of inputs and no "
                f"more. {remedy}, or use --no-recalibrate."
            )
    return wrong


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
