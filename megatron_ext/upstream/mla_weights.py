"""A converted layer's weights into a Megatron module, each rank its share."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.mla.layers import LatentLayer
from megatron_ext.upstream.mla_attention import ConvertedAttention


@torch.no_grad()
def load_layer(attention: ConvertedAttention, layer: LatentLayer) -> None:
    """Copy the weights; the module was built with `LatentShape.of` the layer."""
    mine = attention.tp_group.rank()

    def share(weight: Tensor, dim: int = 0) -> Tensor:
        return weight.chunk(attention.tp_group.size(), dim=dim)[mine]

    query_HXE = share(torch.cat((layer.query_rotary_HCE, layer.query_plain_HNE), dim=1))
    attention.linear_q.weight.copy_(query_HXE.flatten(0, 1))
    if layer.query_rotary_bias_HC is not None and layer.query_plain_bias_HN is not None:
        bias_HX = torch.cat((layer.query_rotary_bias_HC, layer.query_plain_bias_HN), dim=1)
        attention.linear_q.bias.copy_(share(bias_HX).flatten())
    if attention.linear_q_down is not None and layer.query_down_ED is not None:
        attention.linear_q_down.weight.copy_(layer.query_down_ED)
    down = torch.cat((layer.down_RD, layer.key_rotary_BCD.flatten(0, 1)))
    attention.linear_kv_down.weight.copy_(down)
    up_GXR = share(torch.cat((layer.key_up_GNR, layer.value_up_GVR), dim=1))
    attention.linear_kv_up.weight.copy_(up_GXR.flatten(0, 1))
    if attention.key_rotary_bias is not None and layer.key_rotary_bias_BC is not None:
        attention.key_rotary_bias.copy_(layer.key_rotary_bias_BC.flatten())
    attention.linear_proj.weight.copy_(share(layer.output_DHV, dim=1).flatten(1))
    if layer.output_bias_D is not None:
        attention.linear_proj.bias.copy_(layer.output_bias_D)
    if layer.norms is not None:
        norms = layer.norms
        assert attention.query_norm is not None and attention.key_norm is not None
        attention.query_norm.copy_(
            share(torch.cat((norms.query_rotary_GC, norms.query_plain_GN), dim=1))
        )
        attention.key_norm.copy_(share(torch.cat((norms.key_rotary_GC, norms.key_plain_GN), dim=1)))
    attention.frequency_bits.copy_(layer.frequencies_BK.float().contiguous().view(torch.int32))
