"""What `--low-rank-method` sets: one row of option values for each name, with its source.

A row becomes the defaults of the command-line parser, so a flag that the user gives wins.
Invariant the tests check: every name is an option of `MLAConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_ext.mla.config import LowRankMethod, MLAConfig

OptionValues = Mapping[str, str | float | int | bool]

_WEIGHTS_ONLY: OptionValues = {
    "kv_split": False,
    "whitening": False,
    "recalibrate": False,
    "ridge_on": "inputs",
    "token_weight": 0.0,
    "kv_balance": "none",
    "kv_balance_factor": 1.0,
    "metric_exponent": 0.0,
    "query_refit_steps": 0,
    "output_refit": False,
}

_CHANGES: dict[str, OptionValues] = {
    # Ji et al. 2025, arXiv 2502.14837, section 3.2: SVD_joint
    "paper-joint": {},
    # The same, SVD_split: half the latent each (the authors' code gives each the whole)
    "paper-split": {"kv_split": True},
    # SVD-LLM, arXiv 2403.07378; CARE-U, arXiv 2603.17946; MHA2MLA-VLM, arXiv 2601.11464
    "whitened": {"whitening": True},
    # Meng et al. 2025, arXiv 2502.07864: balanced PCA of keys and values in the model with partial
    # rotation, 1 % damping of their Gram matrix
    "transmla": {
        "whitening": True,
        "recalibrate": True,
        "kv_balance": "channel-rms",
        "moment_ridge": 0.01,
        "ridge_on": "outputs",
    },
}


def preset_options(method: LowRankMethod) -> dict[str, str | float | int | bool]:
    """The option values that a method stands for; `best` is the defaults of `MLAConfig`."""
    if method == "best":
        default = MLAConfig()
        return {name: getattr(default, name) for name in _WEIGHTS_ONLY}
    return {**_WEIGHTS_ONLY, **_CHANGES[method]}


def preset(method: LowRankMethod, **options: object) -> MLAConfig:
    """The config of a method, other options beside it."""
    values = {"low_rank_method": method, **preset_options(method), **options}
    return MLAConfig(**values)  # pyright: ignore[reportArgumentType]
