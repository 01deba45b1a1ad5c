"""A layer's attention out of a checkpoint, original or converted: one layer at a time, float32."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.mla.layers import AttentionLayer, LatentLayer
from megatron_ext.mla.tensors import latent_layer_of
from megatron_ext.weights.checks import Checkpoint, FiniteReader
from megatron_ext.weights.operators import Block
from megatron_ext.weights.sources import CheckpointError


def read_layer(source: Checkpoint, layer: int) -> AttentionLayer:
    """One layer's attention, float32.

    Raises:
        ValueError: it has a NaN or an infinity.
    """
    return AttentionLayer.of(attention_tensors(source, layer), source.architecture)


def read_latent_layer(source: Checkpoint, layer: int) -> LatentLayer:
    """One layer's attention of a converted checkpoint, float32."""
    return latent_layer_of(attention_tensors(source, layer), source.architecture)


def attention_tensors(source: Checkpoint, layer: int) -> dict[str, Tensor]:
    """The tensors of a layer's attention, names without what stands before, float32.

    Raises:
        ValueError: one has a NaN or an infinity.
    """
    prefix = attention_prefix(layer)
    read = FiniteReader(source.source)
    tensors = {
        name.removeprefix(prefix): read(Block(name=name, rows=slice(0, info.shape[0])))
        .float()
        .clone()  # what is read is mapped, until the next read
        for name, info in source.source.tensors.items()
        if name.startswith(prefix) and not name.endswith(".rotary_emb.inv_freq")
    }
    if problems := read.problems():
        raise CheckpointError(source.source.location, problems)
    source.source.close()
    return tensors


def attention_prefix(layer: int) -> str:
    """Of the names of a layer's attention."""
    return f"model.layers.{layer}.self_attn."
