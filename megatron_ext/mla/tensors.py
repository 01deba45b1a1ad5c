"""A converted layer as tensors of a checkpoint, named as in `CONVERTED_ATTENTION`.

Invariant the tests check: a model of Megatron's that is filled with them has the logits of the
original, where the conversion is exact.

Legend: as in `layers`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_ext.mla.config import MLAConfig
from megatron_ext.mla.layers import LatentLayer, LatentNorms
from megatron_ext.mla.sizes import latent_rank
from megatron_ext.weights.architecture import Architecture, Converted


def converted_of(config: MLAConfig, architecture: Architecture) -> Converted:
    """The sizes that a checkpoint is converted to; rotary pairs and stride are known."""
    return Converted(
        layout=config.mla_layout,
        num_pairs=config.rope_pairs,
        rank=latent_rank(config, architecture),
        query_rank=config.q_rank,
    )


def layer_tensors(layer: LatentLayer) -> dict[str, Tensor]:
    """The tensors of a layer's `self_attn`, names without what stands before."""
    down_XD = torch.cat((layer.down_RD, layer.key_rotary_BCD.flatten(0, 1)))
    up_GXR = torch.cat((layer.key_up_GNR, layer.value_up_GVR), dim=1)
    found: dict[str, Tensor | None] = {
        "q_a_proj.weight": layer.query_down_ED,
        "q_proj.weight": _heads(layer.query_rotary_HCE, layer.query_plain_HNE),
        "q_proj.bias": _heads(layer.query_rotary_bias_HC, layer.query_plain_bias_HN),
        "kv_a_proj.weight": down_XD,
        "k_rope.bias": None,
        "kv_b_proj.weight": up_GXR.flatten(0, 1),
        "o_proj.weight": layer.output_DHV.flatten(1),
        "o_proj.bias": layer.output_bias_D,
        "rope_frequencies": layer.frequencies_BK.float(),
    }
    if layer.key_rotary_bias_BC is not None:
        found["k_rope.bias"] = layer.key_rotary_bias_BC.flatten()
    if layer.norms is not None:
        norms = layer.norms
        query_GX = torch.cat((norms.query_rotary_GC, norms.query_plain_GN), dim=1)
        key_GX = torch.cat((norms.key_rotary_GC, norms.key_plain_GN), dim=1)
        found |= {"q_norm.weight": query_GX, "k_norm.weight": key_GX}
    return {name: value.contiguous() for name, value in found.items() if value is not None}


def _heads(rotary: Tensor | None, plain: Tensor | None) -> Tensor | None:
    """Rotary and plain widths of each head, head by head."""
    if rotary is None or plain is None:
        return None
    return torch.cat((rotary, plain), dim=1).flatten(0, 1)


def latent_layer_of(tensors: Mapping[str, Tensor], architecture: Architecture) -> LatentLayer:
    """The inverse of `layer_tensors`, in the tensors' type.

    architecture: of the converted checkpoint.
    """
    converted, groups = architecture.converted, architecture.num_groups
    assert converted is not None, "of a converted checkpoint"
    heads, width = architecture.num_heads, architecture.head_size
    rotary, plain = converted.rotary_width, converted.plain_width(width)
    num_keys = converted.num_rotary_keys(groups)
    down_RD, key_XD = tensors["kv_a_proj.weight"].split([converted.rank, num_keys * rotary])
    up_GXR = tensors["kv_b_proj.weight"].unflatten(0, (groups, -1))

    def parts(name: str, count: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        if name not in tensors:
            return None, None
        first, second = tensors[name].reshape(count, rotary + plain, -1).split([rotary, plain], 1)
        return (first, second) if name == "q_proj.weight" else (first[..., 0], second[..., 0])

    query_rotary, query_plain = parts("q_proj.weight", heads)
    assert query_rotary is not None and query_plain is not None, "every layer has queries"
    query_bias, norms = parts("q_proj.bias", heads), None
    query_norm, key_norm = parts("q_norm.weight", groups), parts("k_norm.weight", groups)
    if query_norm[0] is not None and key_norm[0] is not None:
        norms = LatentNorms(
            query_rotary_GC=query_norm[0],
            query_plain_GN=query_norm[1],
            key_rotary_GC=key_norm[0],
            key_plain_GN=key_norm[1],
            epsilon=architecture.norm_epsilon,
        )
    key_bias = tensors.get("k_rope.bias")
    return LatentLayer(
        query_rotary_HCE=query_rotary,
        query_plain_HNE=query_plain,
        query_down_ED=tensors.get("q_a_proj.weight"),
        key_rotary_BCD=key_XD.unflatten(0, (num_keys, rotary)),
        frequencies_BK=tensors["rope_frequencies"].float(),
        down_RD=down_RD,
        key_up_GNR=up_GXR[:, :plain],
        value_up_GVR=up_GXR[:, plain:],
        output_DHV=tensors["o_proj.weight"].unflatten(1, (heads, width)),
        query_rotary_bias_HC=query_bias[0],
        query_plain_bias_HN=query_bias[1],
        key_rotary_bias_BC=None if key_bias is None else key_bias.unflatten(0, (num_keys, rotary)),
        output_bias_D=tensors.get("o_proj.bias"),
        norms=norms,
        softmax_scale=converted.query_scale(width),
    )
