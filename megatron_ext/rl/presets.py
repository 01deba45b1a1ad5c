"""What `--algorithm` sets: one row of option values for each name, with its source.

A row becomes the defaults of the command-line parser, so a flag that the user gives wins; what it
replaced is told by `overridden`, in the log and in config.json.  Options are those of
`AlgorithmConfig` and --loss-normalization.
Invariants the tests check: every name is an option, and every row passes `problems`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from megatron_ext.rl.config import AlgorithmConfig

OptionValues = Mapping[str, str | float | int]

_CHANGES: dict[str, OptionValues] = {
    # Williams 1992, with the mean of the group as baseline
    "reinforce": {"policy_loss": "likelihood"},
    # Ahmadian et al. 2024, "Back to Basics", eq. 8
    "rloo": {"policy_loss": "likelihood", "advantage_baseline": "leave-one-out"},
    # Shao et al. 2024, DeepSeekMath, eq. 3 and 4, section 4.2 (coefficient)
    "grpo": {
        "advantage_normalization": "group-std",
        "loss_normalization": "sample-mean",
        "kl_coefficient": 0.04,
    },
    # DeepCoder 2025: no KL, no entropy term, clip-high and overlong filtering of DAPO
    "grpo-plus": {
        "advantage_normalization": "group-std",
        "clip_high": 0.28,
        "overlong_episodes": "mask",
    },
    # GRPO without KL, corrected for the sampler/trainer gap: Yao et al. 2025, truncated importance
    # sampling
    "grpo-tis": {
        "advantage_normalization": "group-std",
        "loss_normalization": "sample-mean",
        "sampler_correction_cap": 2.0,
    },
    # Yu et al. 2025, eq. 8 to 13
    "dapo": {
        "advantage_normalization": "group-std",
        "clip_high": 0.28,
        "zero_variance_groups": "drop",
        "overlong_penalty": 1.0,
    },
    # Liu et al. 2025, "Understanding R1-Zero-Like Training", section 3.2
    "dr-grpo": {"loss_normalization": "constant"},
    # Schulman et al. 2017; without a critic, advantages normalised over the batch as in AReaL;
    # dual clip of Ye et al. 2020
    "ppo": {
        "advantage_baseline": "none",
        "advantage_normalization": "batch",
        "dual_clip": 3.0,
    },
    # AReaL 2025, eq. 5
    "decoupled-ppo": {
        "advantage_baseline": "none",
        "advantage_normalization": "batch",
        "sampler_correction_cap": inf,
    },
    # Schulman et al. 2025, "LoRA Without Regret": the sum over tokens of p_learner / p_sampler * A
    "importance-sampling": {
        "policy_loss": "importance",
        "old_policy": "sampler",
        "loss_normalization": "token-sum",
    },
    # Zheng et al. 2025, eq. 5 to 7, section 5.1 (clipping ranges)
    "gspo": {
        "ratio_level": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "advantage_normalization": "group-std",
        "loss_normalization": "sample-mean",
    },
    # MiniMax-M1 2025, eq. 4 and 5: no lower bound; the upper one as in Khatri et al. 2025 (ScaleRL)
    "cispo": {
        "policy_loss": "cispo",
        "clip_low": 1.0,
        "clip_high": 4.0,
        "advantage_normalization": "group-std",
    },
}

_COMMON: OptionValues = {
    "loss_normalization": "global-token-mean",
    **{name: value for name, value in vars(AlgorithmConfig()).items() if name != "algorithm"},
}
PRESETS: Mapping[str, OptionValues] = {
    name: {**_COMMON, **changes} for name, changes in _CHANGES.items()
}
"""Algorithm -> value of every option that belongs to it.  Supervised training sets none."""


def preset_defaults(algorithm: str | None) -> OptionValues:
    """Defaults of the parser for the algorithm; empty for one without a row."""
    return PRESETS.get(algorithm or "", {})


def overridden(algorithm: str, values: Mapping[str, object]) -> str | None:
    """One line with each option of the preset that has another value in `values`; None = none has.

    For example "preset grpo: --clip-high 0.28 (preset 0.2), --kl-coefficient 0.0 (preset 0.04)".
    """
    changed = [
        f"--{name.replace('_', '-')} {values[name]} (preset {value})"
        for name, value in preset_defaults(algorithm).items()
        if name in values and values[name] != value
    ]
    return f"preset {algorithm}: {', '.join(changed)}" if changed else None
