"""What a layout makes of a layer before low rank: queries and keys in a rotary and a plain part.

Queries are linear maps of the original query heads, so that refits can replace a map and fold it
into the weights at the end.

Legend: as in `layers`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.mla.layers import AttentionLayer, LatentNorms


@dataclass(frozen=True, kw_only=True)
class RotarySplit:
    """Queries and keys of a layer with fewer rotary pairs; exact but for what pairs lost."""

    query_rotary_HWC: Tensor
    """Maps from original queries (row vectors) to the rotary part."""
    query_plain_HWN: Tensor
    """Maps to the plain part."""
    key_rotary_BCD: Tensor
    key_rotary_bias_BC: Tensor | None
    key_plain_GND: Tensor
    """Without a bias: it adds the same to all logits of a query, which the softmax ignores."""
    frequencies_BK: Tensor
    softmax_scale: float
    channels_XM: Tensor | None = None
    """Orthonormal rows over the G * N plain key widths: what a channel of plain keys is; None = a
    width."""
    norms: LatentNorms | None = None
    rotary_loss: float | None = None
    """Share of the pairs' attention-weighted logit variance that is lost; None = not known."""

    def key_scale(self, layer: AttentionLayer, moment_DD: Tensor | None) -> Tensor | None:
        """What an error of each plain key width [G, N] counts after the norm; None without norms.

        The norm's weight over the root mean square of the head, on average over tokens.
        """
        if self.norms is None:
            return None
        key_GWD = layer.key_GWD.double()
        seen_GWD = key_GWD if moment_DD is None else key_GWD @ moment_DD
        square_G = (seen_GWD * key_GWD).sum(-1).mean(-1)
        weight_GN = self.norms.key_plain_GN.double().abs()
        if weight_GN.numel():
            weight_GN = weight_GN.clamp(min=1e-6 * float(weight_GN.max()) + 1e-300)
        return weight_GN / (square_G.clamp(min=1e-300).sqrt())[:, None]


def query_weights(layer: AttentionLayer, maps_HWX: Tensor) -> tuple[Tensor, Tensor | None]:
    """Weights [H, X, D] and biases [H, X] of mapped queries."""
    weight_HXD = maps_HWX.transpose(1, 2) @ layer.query_HWD.to(maps_HWX.dtype)
    if layer.query_bias_HW is None:
        return weight_HXD, None
    return weight_HXD, torch.einsum("hwx,hw->hx", maps_HWX, layer.query_bias_HW.to(maps_HWX.dtype))


def complex_maps(weight_XY: Tensor) -> Tensor:
    """Complex q -> q W as a real map of [real parts, imaginary parts]: [2X, 2Y].

    weight_XY: complex, [..., X, Y].
    """
    real, imaginary = weight_XY.real, weight_XY.imag
    top = torch.cat((real, imaginary), dim=-1)
    bottom = torch.cat((-imaginary, real), dim=-1)
    return torch.cat((top, bottom), dim=-2)
