"""What can still be fitted once keys and values are final: queries, output, and whole layers.

All are least squares with a pull towards the weights they start from, so an exact conversion stays
as it is.  Invariants the tests check: that, and that no fit is worse than where it starts on the
sequences it is fitted to.

Legend: as in `layers`; S sequences of T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_ext.mla.forward import (
    causal_logits,
    head_logits,
    heads,
    latent_head_outputs,
    latent_heads,
)
from megatron_ext.mla.layers import AttentionLayer, LatentLayer
from megatron_ext.mla.low_rank import cholesky, damped


@dataclass(frozen=True, kw_only=True)
class _Sequence:
    """What one head's query fit needs of one sequence."""

    attention_TT: Tensor
    """Original attention weights."""
    missing_TT: Tensor
    """Original logits less the rotary part of the new ones, centred."""
    query_TW: Tensor
    key_TN: Tensor
    """New plain keys times the softmax scale."""

    def seen(self, map_WN: Tensor) -> Tensor:
        """Gradient [W, N] of half the squared centred logits that the map makes."""
        logits_TT = _centred(self.query_TW @ map_WN @ self.key_TN.T, self.attention_TT)
        return self.query_TW.T @ (self.attention_TT * logits_TT) @ self.key_TN

    @property
    def target_WN(self) -> Tensor:
        """What `seen` should be."""
        return self.query_TW.T @ (self.attention_TT * self.missing_TT) @ self.key_TN

    @property
    def curvature(self) -> float:
        """Trace of `seen`."""
        square_T = self.key_TN.square().sum(-1)
        mean_TN = self.attention_TT @ self.key_TN
        spread_T = self.attention_TT @ square_T - mean_TN.square().sum(-1)
        return float((self.query_TW.square().sum(-1) * spread_T).sum())


def refit_queries(
    layer: AttentionLayer,
    converted: LatentLayer,
    *,
    maps_HWN: Tensor,
    inputs_STD: Tensor,
    steps: int,
    ridge: float,
) -> Tensor:
    """Maps [H, W, N] from original queries to plain ones that fit the original logits best.

    Minimises sum a_ij c(original - rotary - plain)^2 over each head's map, c centred with the
    original attention a, by conjugate gradients from `maps_HWN`, which are those of `converted`.
    """
    found = [(heads(layer, x_TD), latent_heads(converted, x_TD)) for x_TD in inputs_STD]
    logits = [head_logits(layer, original) for original, _ in found]
    num_heads, scale = len(maps_HWN), converted.softmax_scale
    maps = []
    for head in range(num_heads):
        sequences = []
        for (original, new), of_heads in zip(found, logits, strict=True):
            logits_TT = next(of_heads)
            attention_TT = logits_TT.softmax(-1)
            key = head * len(new.key_rotary_BTC) // num_heads
            rotary_TT = causal_logits(
                new.query_rotary_HTC[head], new.key_rotary_BTC[key], scale=scale
            )
            missing_TT = torch.where(attention_TT > 0, logits_TT - rotary_TT, 0.0)
            key_TN = new.key_plain_GTN[head * len(new.key_plain_GTN) // num_heads] * scale
            sequences.append(
                _Sequence(
                    attention_TT=attention_TT,
                    missing_TT=_centred(missing_TT, attention_TT),
                    query_TW=original.query_HTW[head],
                    key_TN=key_TN,
                )
            )
        maps.append(_fit(sequences, maps_HWN[head], steps=steps, ridge=ridge))
    return torch.stack(maps)


def _centred(values_TT: Tensor, attention_TT: Tensor) -> Tensor:
    """Values less their mean under each row of attention."""
    return values_TT - (attention_TT * values_TT).sum(-1, keepdim=True)


def _fit(sequences: list[_Sequence], start_WN: Tensor, *, steps: int, ridge: float) -> Tensor:
    pull = ridge * sum(sequence.curvature for sequence in sequences) / max(start_WN.numel(), 1)

    def curved(map_WN: Tensor) -> Tensor:
        return sum((s.seen(map_WN) for s in sequences), start=pull * map_WN)

    target_WN = sum((s.target_WN for s in sequences), start=pull * start_WN)
    return conjugate_gradients(curved, target=target_WN, start=start_WN, steps=steps)


def conjugate_gradients(
    curved: Callable[[Tensor], Tensor], *, target: Tensor, start: Tensor, steps: int
) -> Tensor:
    """Solve curved(x) = target for a positive semidefinite linear map (Hestenes and Stiefel 1952).

    Stops early where the remainder is 1e-12 of the target.
    """
    solution, remainder = start, target - curved(start)
    direction, size = remainder, remainder.square().sum()
    enough = 1e-24 * float(target.square().sum())
    for _ in range(steps):
        if float(size) <= enough:
            break
        bent = curved(direction)
        length = size / (direction * bent).sum()
        solution = solution + length * direction
        remainder = remainder - length * bent
        last, size = size, remainder.square().sum()
        direction = remainder + size / last * direction
    return solution


def original_output(layer: AttentionLayer, x_TD: Tensor) -> Tensor:
    """Output [T, D] of original attention without what biases of values and output add."""
    found = heads(replace(layer, value_bias_GV=None), x_TD)
    out_TD = torch.zeros_like(x_TD)
    for head, logits_TT in enumerate(head_logits(layer, found)):
        value_TV = found.value_GTV[head // layer.heads_per_group]
        out_TD += logits_TT.softmax(-1) @ value_TV @ layer.output_DHV[:, head].T
    return out_TD


def latent_outputs(layer: LatentLayer, x_TD: Tensor) -> Tensor:
    """Outputs [T, H * V] of converted heads."""
    return torch.cat(list(latent_head_outputs(layer, latent_heads(layer, x_TD))), dim=-1)


def refit_output(
    layer: AttentionLayer, converted: LatentLayer, *, inputs_STD: Tensor, ridge: float
) -> Tensor:
    """Output projection [D, H, V] that makes the original output of the converted heads."""
    start_DO = converted.output_DHV.flatten(1).double()
    size = start_DO.shape[1]
    moment_OO = torch.zeros(size, size, dtype=torch.float64)
    crossed_OD = torch.zeros(size, len(start_DO), dtype=torch.float64)
    for x_TD in inputs_STD:
        outputs_TO = latent_outputs(converted, x_TD).double()
        moment_OO += outputs_TO.T @ outputs_TO
        crossed_OD += outputs_TO.T @ original_output(layer, x_TD).double()
    fitted_DO = _towards(start_DO, moment_OO, crossed_OD.T, ridge=ridge)
    return fitted_DO.view_as(converted.output_DHV).to(converted.output_DHV.dtype)


def compensated(
    layer: AttentionLayer, *, seen_moment_DD: Tensor, crossed_DD: Tensor, ridge: float
) -> AttentionLayer:
    """The layer refitted to the inputs it gets behind converted layers.

    seen_moment_DD: E[s s^T] of those inputs.
    crossed_DD: E[x s^T] with the original inputs of the same tokens.
    """

    def fitted(weight_XYD: Tensor) -> Tensor:
        rows_MD = weight_XYD.double().flatten(0, 1)
        wanted_MD = rows_MD @ crossed_DD.double()
        found_MD = _towards(rows_MD, seen_moment_DD.double(), wanted_MD, ridge=ridge)
        return found_MD.view_as(weight_XYD).to(weight_XYD.dtype)

    return replace(
        layer,
        query_HWD=fitted(layer.query_HWD),
        key_GWD=fitted(layer.key_GWD),
        value_GVD=fitted(layer.value_GVD),
    )


def _towards(start_MD: Tensor, moment_DD: Tensor, wanted_MD: Tensor, *, ridge: float) -> Tensor:
    """W with W C = wanted in least squares, pulled towards `start` by a share of C's mean size."""
    pull = damped(moment_DD, ridge=ridge) - moment_DD
    lower_DD = cholesky(moment_DD, ridge=ridge)
    return torch.cholesky_solve((wanted_MD + start_MD @ pull).T, lower_DD).T
