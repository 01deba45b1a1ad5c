"""Drawing tokens from logits: one uniform number a row, turned into a token by the inverse CDF.

The vocabulary is walked in its own order, in blocks, so a draw costs a few passes over the logits
(`torch.multinomial` takes 30 times as long on a CPU) and depends on nothing but logits and number.
Invariants the tests check: frequencies match the exact probabilities; a row's draw does not change
with the rows beside it; log-probabilities are those of the distribution that was drawn from.
Not covered: penalties for repetition and other processors that look at the context.

Legend: N rows, V vocabulary, B tokens of a block, K blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.rollout.types import SamplingParams

_BLOCK = 256
"""About the square root of a vocabulary: as many blocks as tokens in one."""
_FIRST_CANDIDATES = 256
"""Most likely tokens that top-p looks at first; more only where they are not enough."""


@dataclass(frozen=True, kw_only=True)
class Draws:
    """What was drawn in each row."""

    tokens: list[int]
    logprobs: list[float]
    """Log-probability of the token under the distribution it was drawn from, in nats."""
    top: list[list[tuple[int, float]]]
    """The most likely (token, log-probability) pairs of each row, as many as asked for."""


def draw(
    logits_NV: Tensor,
    *,
    params: Sequence[SamplingParams],
    uniforms: Sequence[float],
    num_top: Sequence[int] = (),
) -> Draws:
    """One token for each row of float logits; they may be overwritten.

    params, uniforms, num_top: one for each row; an empty `num_top` means 0 for all.
    """
    if params and all(value is params[0] for value in params):  # as usual; no need to hash them
        return _draw_alike(logits_NV, params[0], uniforms, num_top)
    groups: dict[SamplingParams, list[int]] = {}
    for row, value in enumerate(params):
        groups.setdefault(value, []).append(row)
    if len(groups) == 1:
        return _draw_alike(logits_NV, next(iter(groups)), uniforms, num_top)
    tokens, logprobs, top = [0] * len(params), [0.0] * len(params), [[]] * len(params)
    for value, rows in groups.items():
        drawn = _draw_alike(
            logits_NV[rows],
            value,
            [uniforms[row] for row in rows],
            [num_top[row] for row in rows] if num_top else (),
        )
        for place, row in enumerate(rows):
            tokens[row], logprobs[row] = drawn.tokens[place], drawn.logprobs[place]
            top[row] = drawn.top[place] if drawn.top else []
    return Draws(tokens=tokens, logprobs=logprobs, top=top)


def _draw_alike(
    logits_NV: Tensor, params: SamplingParams, uniforms: Sequence[float], num_top: Sequence[int]
) -> Draws:
    """`draw` for rows with the same parameters."""
    weights_NV = _weights_(logits_NV, params)
    if params.is_greedy:
        total_N = weights_NV.sum(dim=1)
        token_N = first_maximum(weights_NV)
    else:
        uniform_N = torch.tensor(uniforms, dtype=torch.float64, device=logits_NV.device)
        token_N, total_N = inverse_cdf(weights_NV, uniform_N)
    weight_N = weights_NV.gather(1, token_N[:, None]).squeeze(1)
    logprob_N = (weight_N / total_N).log()
    most = max(num_top, default=0)
    return Draws(
        tokens=token_N.tolist(),
        logprobs=logprob_N.tolist(),
        top=_most_likely(weights_NV, total_N, num_top) if most else [],
    )


def probabilities(logits_NV: Tensor, params: SamplingParams) -> Tensor:
    """The distribution [N, V] that `draw` draws from; a greedy one is that at temperature 1."""
    weights_NV = _weights_(logits_NV.clone(), params)
    return weights_NV / weights_NV.sum(dim=1, keepdim=True)


def first_maximum(values_NV: Tensor) -> Tensor:
    """Index [N] of each row's first largest value; by blocks, as `argmax` is slow on a CPU."""
    num_full = values_NV.shape[1] // _BLOCK
    if num_full < 4:
        return values_NV.argmax(dim=1)
    full_NKB = values_NV[:, : num_full * _BLOCK].unflatten(1, (num_full, _BLOCK))
    rest_NB = values_NV[:, num_full * _BLOCK :]
    most_NK = full_NKB.amax(dim=2)
    if rest_NB.shape[1]:
        most_NK = torch.cat([most_NK, rest_NB.amax(dim=1, keepdim=True)], dim=1)
    block_N1 = most_NK.argmax(dim=1, keepdim=True)
    index_NB = block_N1 * _BLOCK + torch.arange(_BLOCK, device=values_NV.device)
    # Beyond the end the last value stands in, behind itself: it is never the first largest.
    inside_NB = values_NV.gather(1, index_NB.clamp(max=values_NV.shape[1] - 1))
    return block_N1.squeeze(1) * _BLOCK + inside_NB.argmax(dim=1)


def inverse_cdf(weights_NV: Tensor, uniform_N: Tensor) -> tuple[Tensor, Tensor]:
    """First token whose cumulated weight exceeds uniform x total [N], and the totals [N].

    weights at least 0, some above it in every row; a token of weight 0 is never drawn.
    """
    size = weights_NV.shape[1]
    if size <= 4 * _BLOCK:
        cumulated_NV = weights_NV.cumsum(dim=1, dtype=torch.float64)
        total_N = cumulated_NV[:, -1]
        target_N1 = (uniform_N * total_N)[:, None]
        return _first_above(cumulated_NV, target_N1).squeeze(1), total_N
    num_full = size // _BLOCK
    full_NKB = weights_NV[:, : num_full * _BLOCK].unflatten(1, (num_full, _BLOCK))
    rest_N1 = weights_NV[:, num_full * _BLOCK :].sum(dim=1, keepdim=True)
    sums_NK = torch.cat([full_NKB.sum(dim=2), rest_N1], dim=1)
    cumulated_NK = sums_NK.cumsum(dim=1, dtype=torch.float64)
    total_N = cumulated_NK[:, -1]
    target_N1 = (uniform_N * total_N)[:, None]
    block_N1 = _first_above(cumulated_NK, target_N1)
    before_N1 = cumulated_NK.gather(1, block_N1) - sums_NK.gather(1, block_N1)
    index_NB = block_N1 * _BLOCK + torch.arange(_BLOCK, device=weights_NV.device)
    inside_NB = weights_NV.gather(1, index_NB.clamp(max=size - 1))
    inside_NB.masked_fill_(index_NB >= size, 0)
    place_N1 = _first_above(inside_NB.cumsum(dim=1, dtype=torch.float64), target_N1 - before_N1)
    return (block_N1 * _BLOCK + place_N1).squeeze(1), total_N


def _first_above(cumulated_NK: Tensor, target_N1: Tensor) -> Tensor:
    """Index [N, 1] of the first sum above the target, at most of the last one that grows."""
    last_N1 = cumulated_NK[:, -1:]
    above_N1 = (cumulated_NK <= target_N1).sum(dim=1, keepdim=True)
    return torch.minimum(above_N1, (cumulated_NK < last_N1).sum(dim=1, keepdim=True))


def _weights_(logits_NV: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities up to a factor [N, V], 1 for the most likely token; overwrites the logits."""
    if params.temperature not in (0, 1):
        logits_NV.div_(params.temperature)
    weights_NV = logits_NV.sub_(logits_NV.amax(dim=1, keepdim=True)).exp_()
    if params.is_greedy or not params.is_cut:
        return weights_NV
    size = weights_NV.shape[1]
    if 0 < params.top_k < size:
        kth_N1 = weights_NV.topk(params.top_k, dim=1).values[:, -1:]
        weights_NV.masked_fill_(weights_NV < kth_N1, 0)
    if params.top_p < 1:
        weights_NV.masked_fill_(weights_NV < _least_of_nucleus(weights_NV, params.top_p), 0)
    if params.min_p:
        weights_NV.masked_fill_(weights_NV < params.min_p, 0)
    return weights_NV


def _least_of_nucleus(weights_NV: Tensor, top_p: float) -> Tensor:
    """Weight [N, 1] of the last token that top-p keeps (Holtzman et al. 2019)."""
    size = weights_NV.shape[1]
    goal_N1 = top_p * weights_NV.sum(dim=1, keepdim=True, dtype=torch.float64)
    count = min(size, _FIRST_CANDIDATES)
    while True:
        sorted_NK = weights_NV.topk(count, dim=1).values
        cumulated_NK = sorted_NK.cumsum(dim=1, dtype=torch.float64)
        if count == size or bool((cumulated_NK[:, -1:] >= goal_N1).all()):
            break
        count = min(16 * count, size)
    last_N1 = (cumulated_NK < goal_N1).sum(dim=1, keepdim=True).clamp(max=count - 1)
    return sorted_NK.gather(1, last_N1)


def _most_likely(
    weights_NV: Tensor, total_N: Tensor, num_top: Sequence[int]
) -> list[list[tuple[int, float]]]:
    """The most likely tokens of each row with their log-probabilities; those cut are left out."""
    count = min(max(num_top), weights_NV.shape[1])
    weight_NK, token_NK = weights_NV.topk(count, dim=1)
    logprob_NK = (weight_NK / total_N[:, None]).log()
    pairs = zip(token_NK.tolist(), logprob_NK.tolist(), strict=True)
    return [
        [(t, p) for t, p in zip(tokens, logprobs, strict=True) if p > -float("inf")][:wanted]
        for (tokens, logprobs), wanted in zip(pairs, num_top, strict=True)
    ]
