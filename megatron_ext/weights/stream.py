"""A whole model, one parameter after the other, without building it: for conversion of any size.

Invariant the tests check: checkpoint tensors -> Megatron's parameters -> checkpoint tensors is the
identity, bit for bit.  No more than one parameter is held.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_ext.weights.architecture import Architecture
from megatron_ext.weights.families import parameters
from megatron_ext.weights.operators import WHOLE, scatter
from megatron_ext.weights.sources import TensorInfo
from megatron_ext.weights.table import Parameter


def checkpoint_tensors(parameter: Parameter, values: Tensor) -> dict[str, Tensor]:
    """The checkpoint tensors of one whole parameter; the vocabulary's padding is left out."""
    tensors = {
        name: torch.empty(shape, dtype=torch.float32 if parameter.is_bits else values.dtype)
        for name, shape in parameter.operator.tensors().items()
    }
    scatter(values, parameter.operator, shard=WHOLE, tensors=tensors)
    return tensors


def announced_tensors(
    architecture: Architecture,
    *,
    dtype: torch.dtype,
    like: Mapping[str, TensorInfo] | None = None,
) -> dict[str, TensorInfo]:
    """What a checkpoint of an architecture consists of, in the order of export, for the writer.

    like: a checkpoint whose types are kept where it has the tensor, whatever ``dtype`` says.
    """
    announced = {}
    for parameter in parameters(architecture):
        kind = torch.float32 if parameter.is_float32 else dtype
        for name, shape in parameter.operator.tensors().items():
            if not parameter.is_copy:
                old = like[name].dtype if like and name in like else kind
                announced[name] = TensorInfo(shape=shape, dtype=old)
    return announced
