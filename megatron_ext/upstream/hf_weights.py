"""Checkpoint tensors into the model chunks of this rank: any TP, PP, VPP, EP and DP.

Each rank reads only the rectangles it holds.  Invariant the tests check: logits equal transformers'
on every layout.  Not covered: parameters that the family's table does not know (adapters,
multi-token prediction).
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from tqdm import tqdm

from megatron_ext.upstream.layout import Layout
from megatron_ext.upstream.model import bare
from megatron_ext.weights.architecture import Architecture
from megatron_ext.weights.checks import Checkpoint, FiniteReader, open_checkpoint
from megatron_ext.weights.families import parameters
from megatron_ext.weights.operators import WHOLE, Operator, Shape, Shard, fill
from megatron_ext.weights.table import Parameter
from megatron_ext.weights.weight_files import listed

Progress = Callable[[str, int], None]
"""Called with the name and bytes of each parameter that is done."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc\d)\.weight(\d+)")
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Transformer Engine's modules hold the norm before them; the tables name Megatron's own."""
_MODULE = re.compile(r"decoder\.layers\.\d+\.mlp\.experts\.\d+\.|decoder\.layers\.\d+\.|[^.]+\.")
"""A part of the model that a rank holds whole or not at all."""


@dataclass(frozen=True, kw_only=True)
class LocalTensor:
    """A parameter or buffer of this rank, and which part of which parameter of the model it is."""

    tensor: Tensor
    parameter: Parameter
    shard: Shard


def fill_chunks(
    chunks: Sequence[MegatronModule],
    layout: Layout,
    checkpoint: Checkpoint,
    *,
    progress: Progress | None = None,
) -> None:
    """Fill this rank's model chunks, wrapped or bare, from a checkpoint.  Collective.

    Rows of the vocabulary's padding become zero.  Call it before the optimizer is built, which
    copies the weights.

    Raises:
        ValueError: on every rank, if the model of some rank is not the checkpoint's, or some rank
            read a NaN or an infinity.
    """
    read = FiniteReader(checkpoint.source)
    with torch.no_grad():
        for local in local_tensors(chunks, layout, checkpoint.architecture):
            operator = local.parameter.operator
            fill(local.tensor, operator, shard=local.shard, read=read)
            if progress is not None:
                progress(local.parameter.name, local.tensor.numel() * local.tensor.element_size())
    checkpoint.source.close()
    raise_together([f"{checkpoint.source.location}: {problem}" for problem in read.problems()])


def filler(args: Namespace, layout: Layout) -> Callable[[list[MegatronModule]], None] | None:
    """What fills the wrapped chunks from --hf-model, with a progress bar; None without the flag.

    Not for ``pre_wrap_hooks``: Megatron's bf16 wrapper would round a router's choice bias to bf16
    and keep the rounded value in fp32.
    """
    if not args.hf_model:
        return None
    checkpoint = open_checkpoint(Path(args.hf_model), drop_mtp=args.drop_mtp_layers)

    def fill(chunks: list[MegatronModule]) -> None:
        def show(_: str, size: int) -> None:
            bar.update(size)

        with tqdm(
            desc="weights", unit="B", unit_scale=True, disable=not layout.is_writer, leave=False
        ) as bar:
            fill_chunks(chunks, layout, checkpoint, progress=show)

    return fill


def local_tensors(
    chunks: Sequence[MegatronModule], layout: Layout, architecture: Architecture
) -> list[LocalTensor]:
    """All parameters and saved buffers of this rank's chunks.  Collective.

    Raises:
        ValueError: on every rank, if some rank's model does not have the architecture.
    """
    models = [bare(chunk) for chunk in chunks]
    padded = int(models[0].vocab_size)
    table = {p.name: p for p in parameters(architecture, padded_vocab_size=padded)}
    found: list[LocalTensor] = []
    wrong: list[str] = []
    for model in models:
        for name, tensor in _named_tensors(model):
            parameter = table.pop(name, None)
            if parameter is None:
                wrong.append(f"{name}: not in a {architecture.family} of this config.json")
                continue
            shard = _shard(parameter, tensor, layout)
            if shard is None:
                whole = list(parameter.operator.local_shape(WHOLE))
                wrong.append(f"{name}: the model has {list(tensor.shape)}, whole it is {whole}")
                continue
            found.append(LocalTensor(tensor=tensor, parameter=parameter, shard=shard))
    held = {_module(local.parameter.name) for local in found}
    wrong += [
        f"{name}: the checkpoint has it, the model not"
        for name, parameter in table.items()
        if _module(name) in held
    ]
    raise_together(
        listed(
            wrong,
            "the model was built with other sizes or options than the checkpoint has. Build it "
            "from the arguments that hf_config derives",
        )
    )
    return found


def raise_together(problems: list[str]) -> None:
    """Raise ValueError on every rank if any rank has problems, so that none waits for another."""
    everywhere: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, problems)
    texts = dict.fromkeys(text for ranks in everywhere for text in ranks)
    if texts:
        raise ValueError("\n  ".join(texts))


def _module(name: str) -> str:
    match = _MODULE.match(name)
    assert match is not None, f"{name} is no parameter's name"
    return match[0]


def _named_tensors(model: GPTModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters and saved buffers under the tables' names, which count over all ranks."""
    layers: Any = model.decoder.layers
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor) or name.endswith("_extra_state"):
            continue
        match = _LAYER.fullmatch(name)
        if match is None:
            yield name, tensor
        else:
            layer = layers[int(match[1])]
            yield f"decoder.layers.{layer.layer_number - 1}.{_in_layer(match[2], layer)}", tensor


def _in_layer(name: str, layer: Any) -> str:
    """A name within a layer, with the expert counted over all ranks."""
    match = _EXPERT.fullmatch(name)
    if match:
        return f"mlp.experts.{layer.mlp.local_expert_indices[int(match[1])]}.{match[2]}"
    match = _GROUPED_EXPERT.fullmatch(name)
    if match:
        return f"mlp.experts.{layer.mlp.local_expert_indices[int(match[2])]}.{match[1]}.weight"
    return _FUSED_NORMS.get(name, name)


def _shard(parameter: Parameter, tensor: Tensor, layout: Layout) -> Shard | None:
    """Which part a tensor is, by its shape; None if it is no part that this rank can have."""
    group = layout.groups.expt_tp if parameter.is_expert else layout.groups.tp
    for shard in (WHOLE, Shard(index=group.rank(), count=group.size())):
        if _fits(parameter.operator, shard, tuple(tensor.shape)):
            return shard
    return None


def _fits(operator: Operator, shard: Shard, shape: Shape) -> bool:
    try:
        return operator.local_shape(shard) == shape
    except ValueError:  # the ranks do not divide it
        return False
