"""Attention of one sequence written out, original and converted: for statistics and refits.

Not the training path: one sequence, one layer, T x T probabilities of one head at a time.

Legend: as in `layers`; T tokens of a sequence, I of them whose queries are looked at, X widths of
any kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.mla.layers import AttentionLayer, LatentLayer


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Queries, keys (before RoPE) and values of a sequence."""

    query_HTW: Tensor
    key_GTW: Tensor
    value_GTV: Tensor


def project(x_TD: Tensor, weight_HXD: Tensor, bias_HX: Tensor | None = None) -> Tensor:
    """[H, T, X]: the hidden states seen by every head."""
    out_HTX = x_TD @ weight_HXD.transpose(1, 2)
    return out_HTX if bias_HX is None else out_HTX + bias_HX[:, None]


def heads(layer: AttentionLayer, x_TD: Tensor) -> Heads:
    """What the layer makes of normalised hidden states; norms of queries and keys included."""
    query_HTW = project(x_TD, layer.query_HWD, layer.query_bias_HW)
    key_GTW = project(x_TD, layer.key_GWD, layer.key_bias_GW)
    if layer.query_norm_W is not None and layer.key_norm_W is not None:
        query_HTW = normalised(query_HTW, epsilon=layer.norm_epsilon) * layer.query_norm_W
        key_GTW = normalised(key_GTW, epsilon=layer.norm_epsilon) * layer.key_norm_W
    value_GTV = project(x_TD, layer.value_GVD, layer.value_bias_GV)
    return Heads(query_HTW=query_HTW, key_GTW=key_GTW, value_GTV=value_GTV)


def normalised(x: Tensor, *, epsilon: float) -> Tensor:
    """`x` over its root mean square (Zhang and Sennrich 2019), without a weight."""
    return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()


def causal_logits(
    query_IX: Tensor, key_TX: Tensor, *, scale: float, positions_I: Tensor | None = None
) -> Tensor:
    """Logits [I, T] of one head, minus infinity where the key is later than the query.

    positions_I: of the queries; None = those of all tokens.
    """
    logits_IT = query_IX @ key_TX.T * scale
    positions_T = torch.arange(len(key_TX))
    positions_I = positions_T if positions_I is None else positions_I
    return logits_IT.masked_fill(positions_T > positions_I[:, None], -torch.inf)


def head_logits(
    layer: AttentionLayer, found: Heads, *, positions_I: Tensor | None = None
) -> Iterator[Tensor]:
    """Causal logits [I, T] of every query head in turn, of some queries or of all."""
    positions_T = torch.arange(found.query_HTW.shape[1])
    positions_I = positions_T if positions_I is None else positions_I
    key_GTW = layer.pairs.turn(found.key_GTW, positions_T)
    for head, query_TW in enumerate(found.query_HTW):
        turned_IW = layer.pairs.turn(query_TW[positions_I], positions_I)
        key_TW = key_GTW[head // layer.heads_per_group]
        yield causal_logits(turned_IW, key_TW, scale=layer.softmax_scale, positions_I=positions_I)


def attention_output(layer: AttentionLayer, x_TD: Tensor) -> Tensor:
    """Output [T, D] of the original layer, biases included."""
    found = heads(layer, x_TD)
    out_TD = torch.zeros_like(x_TD)
    for head, logits_TT in enumerate(head_logits(layer, found)):
        value_TV = found.value_GTV[head // layer.heads_per_group]
        out_TD += logits_TT.softmax(-1) @ value_TV @ layer.output_DHV[:, head].T
    return out_TD if layer.output_bias_D is None else out_TD + layer.output_bias_D


@dataclass(frozen=True, kw_only=True)
class LatentHeads:
    """What a latent layer makes of a sequence; rotary widths are turned."""

    query_rotary_HTC: Tensor
    query_plain_HTN: Tensor
    key_rotary_BTC: Tensor
    key_plain_GTN: Tensor
    value_GTV: Tensor


def latent_heads(layer: LatentLayer, x_TD: Tensor) -> LatentHeads:
    """Queries, keys and values from normalised hidden states, keys and values not absorbed."""
    query_rotary_HTC, query_plain_HTN = latent_queries(layer, x_TD)
    key_rotary_BTC = project(x_TD, layer.key_rotary_BCD, layer.key_rotary_bias_BC)
    latent_TR = x_TD @ layer.down_RD.T
    key_plain_GTN = project(latent_TR, layer.key_up_GNR)
    if layer.norms is not None:
        norms, width = layer.norms, layer.key_rotary_BCD.shape[1]
        weight_GW = torch.cat((norms.key_rotary_GC, norms.key_plain_GN), dim=1)
        key_GTW = torch.cat((key_rotary_BTC, key_plain_GTN), dim=-1)
        key_GTW = normalised(key_GTW, epsilon=norms.epsilon) * weight_GW[:, None]
        key_rotary_BTC, key_plain_GTN = key_GTW.tensor_split([width], dim=-1)
    return LatentHeads(
        query_rotary_HTC=query_rotary_HTC,
        query_plain_HTN=query_plain_HTN,
        key_rotary_BTC=turn_halves(key_rotary_BTC, layer.frequencies_BK),
        key_plain_GTN=key_plain_GTN,
        value_GTV=project(latent_TR, layer.value_up_GVR),
    )


def latent_queries(layer: LatentLayer, x_TD: Tensor, *, start: int = 0) -> tuple[Tensor, Tensor]:
    """Rotary [H, T, C], turned, and plain [H, T, N] queries of tokens from position `start` on."""
    queried_TE = x_TD if layer.query_down_ED is None else x_TD @ layer.query_down_ED.T
    rotary_HTC = project(queried_TE, layer.query_rotary_HCE, layer.query_rotary_bias_HC)
    plain_HTN = project(queried_TE, layer.query_plain_HNE, layer.query_plain_bias_HN)
    if layer.norms is not None:
        norms, width = layer.norms, rotary_HTC.shape[-1]
        heads_per_group = len(plain_HTN) // len(layer.key_up_GNR)
        weight_GW = torch.cat((norms.query_rotary_GC, norms.query_plain_GN), dim=1)
        query_HTW = torch.cat((rotary_HTC, plain_HTN), dim=-1)
        query_HTW = normalised(query_HTW, epsilon=norms.epsilon)
        query_HTW = query_HTW * weight_GW.repeat_interleave(heads_per_group, 0)[:, None]
        rotary_HTC, plain_HTN = query_HTW.tensor_split([width], dim=-1)
    heads_per_key = len(rotary_HTC) // len(layer.frequencies_BK)
    frequencies_HK = layer.frequencies_BK.repeat_interleave(heads_per_key, 0)
    return turn_halves(rotary_HTC, frequencies_HK, start=start), plain_HTN


def turn_halves(x_BTC: Tensor, frequencies_BK: Tensor, *, start: int = 0) -> Tensor:
    """RoPE of widths in halves at positions from `start` on, each of B with its own frequencies."""
    positions_T = torch.arange(start, start + x_BTC.shape[1], dtype=x_BTC.dtype)
    angles_BTK = positions_T[:, None] * frequencies_BK.to(x_BTC.dtype)[:, None]
    real, imaginary = x_BTC.chunk(2, dim=-1)
    cos, sin = angles_BTK.cos(), angles_BTK.sin()
    return torch.cat((real * cos - imaginary * sin, imaginary * cos + real * sin), dim=-1)


def latent_head_outputs(layer: LatentLayer, found: LatentHeads) -> Iterator[Tensor]:
    """Outputs [T, V] of every query head in turn, before the output projection."""
    num_heads = len(found.query_plain_HTN)
    for head in range(num_heads):
        group = head * len(found.key_plain_GTN) // num_heads
        rotary_key = head * len(found.key_rotary_BTC) // num_heads
        query_TX = torch.cat((found.query_rotary_HTC[head], found.query_plain_HTN[head]), dim=-1)
        key_TX = torch.cat((found.key_rotary_BTC[rotary_key], found.key_plain_GTN[group]), dim=-1)
        logits_TT = causal_logits(query_TX, key_TX, scale=layer.softmax_scale)
        yield logits_TT.softmax(-1) @ found.value_GTV[group]
