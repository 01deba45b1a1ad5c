"""What there is to run on, and what Megatron's options default to because of it."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

_EVERYWHERE = {
    "calculate_per_token_loss": True,  # the one loss law: sums and counts, divided once
    "dist_ckpt_optim_fully_reshardable": True,  # the default format cannot change TP or PP
    "moe_token_dispatcher_type": "alltoall",  # the others need equal lengths on all ranks
    "rerun_mode": "disabled",  # it replays Megatron's own data iterators
    "dataloader_type": "external",
    "micro_batch_size": 1,
    "lr_decay_style": "constant",
    "logging_level": 30,  # warnings; Megatron's default prints every parameter
}
_WITHOUT_TRANSFORMER_ENGINE = {
    "transformer_impl": "local",
    "gradient_accumulation_fusion": False,
    "no_persist_layer_norm": True,
    "apply_rope_fusion": False,
}
_WITHOUT_CUDA = {
    "distributed_backend": "gloo",
    "use_cpu_initialization": True,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_gelu_fusion": False,
    "num_workers": 0,
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The hardware and the optional packages that decide what works."""

    has_cuda: bool
    """Whether torch sees a GPU."""
    has_transformer_engine: bool
    """Whether Transformer Engine can be used: it is installed and there is a GPU."""
    has_apex: bool
    """Whether apex is installed."""


@cache
def this_machine() -> Machine:
    """The machine this process runs on."""
    has_cuda = torch.cuda.is_available()
    return Machine(
        has_cuda=has_cuda,
        has_transformer_engine=has_cuda and _is_installed("transformer_engine"),
        has_apex=_is_installed("apex"),
    )


def machine_defaults(machine: Machine) -> dict[str, Any]:
    """Defaults of Megatron's options that differ from Megatron's: ours, and the machine's."""
    defaults = dict(_EVERYWHERE)
    if not machine.has_transformer_engine:
        defaults |= _WITHOUT_TRANSFORMER_ENGINE
    if not machine.has_cuda:
        defaults |= _WITHOUT_CUDA
    return defaults


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
