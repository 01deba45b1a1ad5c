"""Which rotary pairs of each KV head stay rotary; the others lose their position.

Rules look at the order of the pairs only (MHA2MLA, arXiv 2502.14837, section 3.1), scores at what
the model does with them.  All query heads of a group use the set of their KV head.
Invariant the tests check: every rule equals a literal loop over the masks of the authors' code, and
does not depend on the layout of the pairs.

Legend: P pairs of a head, K of them kept, G KV heads, H query heads.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Rule = Literal["high", "low", "uniform"]
NormScore = Literal["product", "sum"]


def pairs_by_rule(rule: Rule, *, num_pairs: int, kept: int, start: int = 0) -> Tensor:
    """The K kept pairs, ascending: the first (fastest), the last (slowest), or every P / K-th.

    start: first pair of `uniform`; with 0 the kept frequencies are those of a head of 2K widths.

    Raises:
        ValueError: K is not from 0 to P, or does not divide P as `uniform` needs.
    """
    check_kept(kept, num_pairs=num_pairs)
    if rule == "high":
        return torch.arange(kept)
    if rule == "low":
        return torch.arange(num_pairs - kept, num_pairs)
    if kept == 0:
        return torch.arange(0)
    step, rest = divmod(num_pairs, kept)
    if rest:
        below = max(k for k in range(1, kept + 1) if num_pairs % k == 0)
        above = min(k for k in range(kept, num_pairs + 1) if num_pairs % k == 0)
        raise ValueError(
            f"--rope-pairs {kept} does not divide the {num_pairs} rotary pairs of a head, as "
            f"--rope-strategy uniform needs. Use {below} or {above}."
        )
    if not 0 <= start < step:
        raise ValueError(
            f"--rope-uniform-start {start}: with {kept} of {num_pairs} pairs every {step}. pair is "
            f"kept, so the first one is from 0 to {step - 1}."
        )
    return torch.arange(start, num_pairs, step)


def pairs_by_score(score_GP: Tensor, *, kept: int) -> Tensor:
    """The K pairs [G, K] with the largest scores of every KV head, ascending; ties to the faster.

    Raises:
        ValueError: K is not from 0 to P, or a score is not finite.
    """
    check_kept(kept, num_pairs=score_GP.shape[-1])
    if not torch.isfinite(score_GP).all():
        raise ValueError("scores of rotary pairs are not finite: calibrate again.")
    order_GP = score_GP.argsort(dim=-1, descending=True, stable=True)
    return order_GP[:, :kept].sort(dim=-1).values


def norm_scores(query_HP: Tensor, key_GP: Tensor, *, combine: NormScore = "product") -> Tensor:
    """Scores [G, P] of the strategy `2-norm` from mean norms of query and key pairs.

    combine: the paper multiplies the two means, the authors' first code adds them.  The heads of a
    group are added (the paper averages them, which gives the same order).
    """
    query_GQP = query_HP.unflatten(0, (len(key_GP), -1))
    key_GQP = key_GP[:, None]
    scores = query_GQP * key_GQP if combine == "product" else query_GQP + key_GQP
    return scores.sum(1)


def check_kept(kept: int, *, num_pairs: int) -> None:
    """Raise `ValueError` unless so many pairs can be kept."""
    if not 0 <= kept <= num_pairs:
        raise ValueError(
            f"--rope-pairs {kept}: a head has {num_pairs} rotary pairs. Use 0 to {num_pairs}."
        )


def dropped_pairs(kept_GK: Tensor, *, num_pairs: int) -> Tensor:
    """The other pairs [G, P - K] of every KV head, ascending."""
    is_dropped_GP = torch.ones(len(kept_GK), num_pairs, dtype=torch.bool)
    is_dropped_GP.scatter_(1, kept_GK, False)
    return is_dropped_GP.nonzero()[:, 1].view(len(kept_GK), -1)
