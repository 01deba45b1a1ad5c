"""The model whose rotation is partial already and whose latent is not: the text of a second pass.

TransMLA (arXiv 2502.07864) finds the latent of keys and values for the inputs that layers have in
that model.  Here it is a checkpoint in the work folder, converted with a latent of full rank, so
that it runs on every layout that a converted model does.
Invariant the tests check: its layers are the original ones but for the rotation.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron_ext.mla.checkpoint import CheckpointConversion
from megatron_ext.mla.config import MLAConfig
from megatron_ext.mla.presets import preset_options
from megatron_ext.mla.sizes import rank_limit
from megatron_ext.weights.architecture import Architecture

_FOLDER, _SUMS = "partial_rotation", "recalibrated.safetensors"


def sums_file(conversion: CheckpointConversion) -> Path:
    """Where the sums of the second pass are kept for a conversion that goes on."""
    return conversion.work / _SUMS


def partial_rotation(conversion: CheckpointConversion) -> CheckpointConversion:
    """The conversion to the model of the second pass; rotary pairs are known."""
    return replace(
        conversion,
        target=conversion.work / _FOLDER,
        config=full_rank(conversion.config, conversion.source.architecture),
    )


def full_rank(config: MLAConfig, architecture: Architecture) -> MLAConfig:
    """The same rotary keys, with a latent that loses nothing."""
    whole = preset_options("paper-joint") | {"cache_ratio": 0.0, "kv_dims_per_head": 0, "q_rank": 0}
    whole |= {"kv_rank": rank_limit(config, architecture)}
    return replace(config, **whole)  # pyright: ignore[reportArgumentType]
