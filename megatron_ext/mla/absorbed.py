"""Attention of new tokens to a cache of rotary keys and latents; keys and values are never made.

A plain key is U_k c_j, so its logit is (U_k^T q) . c_j: the query moves into the latent.  The
output is U_v sum_j a_ij c_j: one latent for each head leaves it.  U_k and U_v are applied in turn;
U_k^T W_q and W_o U_v, of H R x D numbers each, are never multiplied out, as they would be larger
than the weights of the original attention.
With norms of queries and keys (qk-norm) the plain key is gamma * U_k c_j / s_j.  The weight gamma
goes to the query, and s_j, the root mean square of all widths of the key, is one number of each KV
head that must be cached; the rotary key is cached normalised.
Invariants the tests check: the outputs are those of `forward`, whatever number of tokens comes at
once; what is cached has the size of `sizes.cache_of`.
Not the serving path: one sequence, no pages, no kernels.

Legend: as in `layers`; S cached tokens, T new ones among them, Q query heads of a KV head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.mla.forward import latent_queries, project, turn_halves
from megatron_ext.mla.layers import LatentLayer


@dataclass(frozen=True, kw_only=True)
class LatentCache:
    """What a layer keeps of the tokens of one sequence, from position 0 on."""

    key_rotary_BSC: Tensor
    """Rotary keys, turned; with norms normalised as well."""
    latent_SR: Tensor
    divisor_GS: Tensor | None = None
    """With norms: root mean square of each KV head's whole key, epsilon included."""

    @classmethod
    def empty(cls, layer: LatentLayer) -> LatentCache:
        """Of no tokens, in the type of the layer's weights."""
        num_keys, width = layer.key_rotary_BCD.shape[:2]
        new = layer.down_RD.new_zeros
        return cls(
            key_rotary_BSC=new(num_keys, 0, width),
            latent_SR=new(0, layer.rank),
            divisor_GS=None if layer.norms is None else new(len(layer.key_up_GNR), 0),
        )

    @property
    def num_tokens(self) -> int:
        """S."""
        return len(self.latent_SR)

    @property
    def tensors(self) -> list[Tensor]:
        """All that is kept."""
        found = [self.key_rotary_BSC, self.latent_SR]
        return found if self.divisor_GS is None else [*found, self.divisor_GS]

    def first(self, num_tokens: int) -> LatentCache:
        """Of the first tokens only."""
        return LatentCache(
            key_rotary_BSC=self.key_rotary_BSC[:, :num_tokens],
            latent_SR=self.latent_SR[:num_tokens],
            divisor_GS=None if self.divisor_GS is None else self.divisor_GS[:, :num_tokens],
        )

    def appended(self, layer: LatentLayer, x_TD: Tensor) -> LatentCache:
        """The cache with the next tokens, from their normalised hidden states."""
        rotary_BTC = project(x_TD, layer.key_rotary_BCD, layer.key_rotary_bias_BC)
        latent_TR, divisor_GS = x_TD @ layer.down_RD.T, self.divisor_GS
        if layer.norms is not None and divisor_GS is not None:
            plain_GTN = project(latent_TR, layer.key_up_GNR)
            square_GT = torch.cat((rotary_BTC, plain_GTN), dim=-1).square().mean(-1)
            divisor_GT = (square_GT + layer.norms.epsilon).sqrt()
            rotary_BTC = rotary_BTC / divisor_GT[..., None] * layer.norms.key_rotary_GC[:, None]
            divisor_GS = torch.cat((divisor_GS, divisor_GT), dim=1)
        turned_BTC = turn_halves(rotary_BTC, layer.frequencies_BK, start=self.num_tokens)
        return LatentCache(
            key_rotary_BSC=torch.cat((self.key_rotary_BSC, turned_BTC), dim=1),
            latent_SR=torch.cat((self.latent_SR, latent_TR)),
            divisor_GS=divisor_GS,
        )


def absorbed_outputs(layer: LatentLayer, cache: LatentCache, x_TD: Tensor) -> Tensor:
    """Outputs [T, H * V] of the heads for new tokens, before the output projection.

    cache: with the new tokens at its end (`LatentCache.appended`).
    """
    start = cache.num_tokens - len(x_TD)
    rotary_HTC, plain_HTN = latent_queries(layer, x_TD, start=start)
    plain_GQTN = plain_HTN.unflatten(0, (len(layer.key_up_GNR), -1))
    if layer.norms is not None:
        plain_GQTN = plain_GQTN * layer.norms.key_plain_GN[:, None, None]
    query_GQTR = torch.einsum("gqtn,gnr->gqtr", plain_GQTN, layer.key_up_GNR)
    logits_GQTS = query_GQTR @ cache.latent_SR.T
    if cache.divisor_GS is not None:
        logits_GQTS = logits_GQTS / cache.divisor_GS[:, None, None]
    rotary_BXTC = rotary_HTC.unflatten(0, (len(cache.key_rotary_BSC), -1))
    rotary_BXTS = torch.einsum("bxtc,bsc->bxts", rotary_BXTC, cache.key_rotary_BSC)
    logits_GQTS = logits_GQTS + rotary_BXTS.reshape(logits_GQTS.shape)
    is_later_TS = torch.ones(logits_GQTS.shape[2:], dtype=torch.bool).triu(start + 1)
    logits_GQTS = (layer.softmax_scale * logits_GQTS).masked_fill(is_later_TS, -torch.inf)
    seen_GQTR = logits_GQTS.softmax(-1) @ cache.latent_SR
    return torch.einsum("gqtr,gvr->tgqv", seen_GQTR, layer.value_up_GVR).flatten(1)
