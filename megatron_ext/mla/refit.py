"""What can still be fitted once keys and values are final: queries, output, and whole layers.

All are least squares with a pull towards the weights they start from, so an exact conversion stays
as it is.  Invariants the tests check: that, and that no fit is worse than where it starts on the
sequences it is fitted to.

Legend: as in `layers`; S sequences of T tokens, I of which have queries that are fitted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_ext.mla.forward import (
    attention_output,
    causal_logits,
    head_logits,
    heads,
    latent_head_outputs,
    latent_heads,
)
from megatron_ext.mla.layers import AttentionLayer, LatentLayer
from megatron_ext.mla.low_rank import cholesky, damped
from megatron_ext.mla.statistics import sampled_queries

RIDGES = (1e-3, 1e-2, 1e-1, 1.0)
"""Pulls of the output's fit towards its start that are tried, of the outputs' mean moment."""


@dataclass(frozen=True, kw_only=True)
class _Sequence:
    """What one head's query fit needs of one sequence."""

    attention_IT: Tensor
    """Original attention weights."""
    missing_IT: Tensor
    """Original logits less the rotary part of the new ones, centred."""
    query_IW: Tensor
    key_TN: Tensor
    """New plain keys times the softmax scale."""

    def seen(self, map_WN: Tensor) -> Tensor:
        """Gradient [W, N] of half the squared centred logits that the map makes."""
        logits_IT = _centred(self.query_IW @ map_WN @ self.key_TN.T, self.attention_IT)
        return self.query_IW.T @ (self.attention_IT * logits_IT) @ self.key_TN

    @property
    def target_WN(self) -> Tensor:
        """What `seen` should be."""
        return self.query_IW.T @ (self.attention_IT * self.missing_IT) @ self.key_TN

    def factors(self) -> tuple[Tensor, Tensor]:
        """[W, W] and [N, N] of the Kronecker product nearest in kind to `seen`, times its trace.

        `seen` is the sum over queries of q q^T x S with S the covariance of keys under the query's
        attention: each factor is that sum with the other one's trace in its place.
        """
        mean_IN = self.attention_IT @ self.key_TN
        square_I = self.attention_IT @ self.key_TN.square().sum(-1)
        spread_I = square_I - mean_IN.square().sum(-1)
        size_I = self.query_IW.square().sum(-1)
        weight_T = self.attention_IT.T @ size_I
        queries_WW = (self.query_IW * spread_I[:, None]).T @ self.query_IW
        keys_NN = (self.key_TN * weight_T[:, None]).T @ self.key_TN
        return queries_WW, keys_NN - (mean_IN * size_I[:, None]).T @ mean_IN


def refit_queries(
    layer: AttentionLayer,
    converted: LatentLayer,
    *,
    maps_HWN: Tensor,
    inputs_STD: Tensor,
    steps: int,
    ridge: float,
    num_queries: int = 0,
) -> Tensor:
    """Maps [H, W, N] from original queries to plain ones that fit the original logits best.

    Minimises sum a_ij c(original - rotary - plain)^2 over each head's map, c centred with the
    original attention a, by conjugate gradients from `maps_HWN`, which are those of `converted`.

    num_queries: evenly spaced queries of each sequence that are fitted; 0 = all.
    """
    rows_I = sampled_queries(inputs_STD.shape[1], num_queries)
    found = [(heads(layer, x_TD), latent_heads(converted, x_TD)) for x_TD in inputs_STD]
    logits = [head_logits(layer, original, positions_I=rows_I) for original, _ in found]
    num_heads, scale = len(maps_HWN), converted.softmax_scale
    maps = []
    for head in range(num_heads):
        sequences = []
        for (original, new), of_heads in zip(found, logits, strict=True):
            logits_IT = next(of_heads)
            attention_IT = logits_IT.softmax(-1)
            key = head * len(new.key_rotary_BTC) // num_heads
            rotary_IT = causal_logits(
                new.query_rotary_HTC[head, rows_I],
                new.key_rotary_BTC[key],
                scale=scale,
                positions_I=rows_I,
            )
            missing_IT = torch.where(attention_IT > 0, logits_IT - rotary_IT, 0.0)
            key_TN = new.key_plain_GTN[head * len(new.key_plain_GTN) // num_heads] * scale
            sequences.append(
                _Sequence(
                    attention_IT=attention_IT,
                    missing_IT=_centred(missing_IT, attention_IT),
                    query_IW=original.query_HTW[head, rows_I],
                    key_TN=key_TN,
                )
            )
        maps.append(_fit(sequences, maps_HWN[head], steps=steps, ridge=ridge))
    return torch.stack(maps)


def _centred(values_IT: Tensor, attention_IT: Tensor) -> Tensor:
    """Values less their mean under each row of attention."""
    return values_IT - (attention_IT * values_IT).sum(-1, keepdim=True)


def _fit(sequences: list[_Sequence], start_WN: Tensor, *, steps: int, ridge: float) -> Tensor:
    factors = [sequence.factors() for sequence in sequences]
    queries_W, query_WW = torch.linalg.eigh(sum(q for q, _ in factors))
    keys_N, key_NN = torch.linalg.eigh(sum(k for _, k in factors))
    trace = float(queries_W.sum())
    if not trace > 0 or not start_WN.numel():
        return start_WN
    pull = ridge * trace / start_WN.numel()
    curvature_WN = (queries_W[:, None] * keys_N).clamp(min=0) / trace + pull

    def curved(map_WN: Tensor) -> Tensor:
        return sum((s.seen(map_WN) for s in sequences), start=pull * map_WN)

    def flattened(gradient_WN: Tensor) -> Tensor:
        return query_WW @ ((query_WW.T @ gradient_WN @ key_NN) / curvature_WN) @ key_NN.T

    target_WN = sum((s.target_WN for s in sequences), start=pull * start_WN)
    return conjugate_gradients(
        curved, target=target_WN, start=start_WN, steps=steps, flattened=flattened
    )


def conjugate_gradients(
    curved: Callable[[Tensor], Tensor],
    *,
    target: Tensor,
    start: Tensor,
    steps: int,
    flattened: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor:
    """Solve curved(x) = target for a positive linear map (Hestenes and Stiefel 1952).

    flattened: an approximate inverse of `curved`, symmetric and positive.  Without one, few large
        eigenvalues make the steps repeat what rounding left of them.
    Stops early where the remainder is 1e-12 of the target.
    """
    solution, remainder = start, target - curved(start)
    direction = flattened(remainder)
    size = (remainder * direction).sum()
    enough = 1e-24 * float((target * flattened(target)).sum())
    for _ in range(steps):
        if float(size) <= enough:
            break
        bent = curved(direction)
        length = size / (direction * bent).sum()
        solution = solution + length * direction
        remainder = remainder - length * bent
        flat = flattened(remainder)
        last, size = size, (remainder * flat).sum()
        direction = flat + size / last * direction
    return solution


def original_output(layer: AttentionLayer, x_TD: Tensor) -> Tensor:
    """Output [T, D] of original attention without what biases of values and output add."""
    return attention_output(replace(layer, value_bias_GV=None, output_bias_D=None), x_TD)


def latent_outputs(layer: LatentLayer, x_TD: Tensor) -> Tensor:
    """Outputs [T, H * V] of converted heads."""
    return torch.cat(list(latent_head_outputs(layer, latent_heads(layer, x_TD))), dim=-1)


def refit_output(
    layer: AttentionLayer,
    converted: LatentLayer,
    *,
    inputs_STD: Tensor,
    wanted_STD: Tensor | None = None,
) -> Tensor:
    """Output projection [D, H, V] that makes the original output of the converted heads.

    wanted_STD: outputs without biases; None = those of the original layer for the same inputs.

    How strong the pull towards the present one is, is decided by the error on the half of the
    tokens that was not fitted; where no fit helps there, it stays.
    """
    start_DO = converted.output_DHV.flatten(1).double()
    if wanted_STD is None:
        wanted_STD = torch.stack([original_output(layer, x_TD) for x_TD in inputs_STD])
    halves = [_Half.of(rows) for rows in _halves(converted, inputs_STD, wanted_STD)]
    losses = {0.0: sum(half.loss(start_DO) for half in halves)}
    for ridge in RIDGES:
        fits = [half.fitted(start_DO, ridge=ridge) for half in halves]
        losses[ridge] = halves[1].loss(fits[0]) + halves[0].loss(fits[1])
    best = min(losses, key=lambda ridge: losses[ridge])
    if best == 0.0:
        return converted.output_DHV
    whole = _Half(
        moment_OO=halves[0].moment_OO + halves[1].moment_OO,
        wanted_DO=halves[0].wanted_DO + halves[1].wanted_DO,
    )
    fitted_DO = whole.fitted(start_DO, ridge=best)
    return fitted_DO.view_as(converted.output_DHV).to(converted.output_DHV.dtype)


@dataclass(frozen=True, kw_only=True)
class _Half:
    """Sums over half of the tokens, o the outputs of all heads and y what should come of them."""

    moment_OO: Tensor
    """Of o o^T."""
    wanted_DO: Tensor
    """Of y o^T."""

    @classmethod
    def of(cls, rows: list[tuple[Tensor, Tensor]]) -> _Half:
        """From pieces of (o, y)."""
        return cls(
            moment_OO=sum((o.T @ o for o, _ in rows[1:]), start=rows[0][0].T @ rows[0][0]),
            wanted_DO=sum((y.T @ o for o, y in rows[1:]), start=rows[0][1].T @ rows[0][0]),
        )

    def fitted(self, start_DO: Tensor, *, ridge: float) -> Tensor:
        """The projection with the least loss, pulled towards the present one."""
        return _towards(start_DO, self.moment_OO, self.wanted_DO, ridge=ridge)

    def loss(self, weight_DO: Tensor) -> float:
        """Squared error of a projection, but for what does not depend on it."""
        return float(((weight_DO @ self.moment_OO - 2 * self.wanted_DO) * weight_DO).sum())


def _halves(
    converted: LatentLayer, inputs_STD: Tensor, wanted_STD: Tensor
) -> list[list[tuple[Tensor, Tensor]]]:
    """(o, y) of every other sequence, or of the halves of a single one; float64."""
    rows = [
        (latent_outputs(converted, x_TD).double(), wanted_TD.double())
        for x_TD, wanted_TD in zip(inputs_STD, wanted_STD, strict=True)
    ]
    if len(rows) > 1:
        return [rows[0::2], rows[1::2]]
    middle = len(rows[0][0]) // 2
    return [[(o[part], y[part]) for o, y in rows] for part in (slice(middle), slice(middle, None))]


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
