"""Packing: which tokens are computed together, and what each of them weighs in the loss."""

from megatron_ext.packing.balance import allocate, equalize, legal_num_microbatches
from megatron_ext.packing.batch import (
    RowLayout,
    Sample,
    build_microbatch,
    build_microbatches,
    filler_microbatch,
)
from megatron_ext.packing.config import PackingConfig
from megatron_ext.packing.pack import pack, padding_share, token_budget_batches
from megatron_ext.packing.types import Microbatch
from megatron_ext.packing.weights import LossWeights, loss_weights

__all__ = [
    "LossWeights",
    "Microbatch",
    "PackingConfig",
    "RowLayout",
    "Sample",
    "allocate",
    "build_microbatch",
    "build_microbatches",
    "equalize",
    "filler_microbatch",
    "legal_num_microbatches",
    "loss_weights",
    "pack",
    "padding_share",
    "token_budget_batches",
]
