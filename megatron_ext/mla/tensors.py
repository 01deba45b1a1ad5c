"""A converted layer as tensors of a checkpoint, named as in `CONVERTED_ATTENTION`.

Invariant the tests check: a model of Megatron's that is filled with them has the logits of the
original, where the conversion is exact.

Legend: as in `layers`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.mla.config import MLAConfig
from megatron_ext.mla.layers import LatentLayer
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
