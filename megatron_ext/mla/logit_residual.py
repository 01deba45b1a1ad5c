"""What a query head loses when a rotary pair loses its position, and the best that can be put back.

Pair l gives the logit of query i and key j the part y = Re(z exp(1j f_l (j - i))), z = conj(q_l)
k_l.  Without rotation, but with a complex factor m on the query, it gives m_0 Re z - m_1 Im z.  The
softmax ignores what is the same for all keys of a query, so both are centred with the query's own
attention weights a_ij; then sum_ij a_ij (y - yhat)^2 is twice the second-order KL divergence of the
attention rows, up to cross terms between pairs.  It is a quadratic form in m, and everything is in
the Gram matrix of the four centred features

    Re z,  -Im z,  y,  y turned at the frequency of another pair (for slots that share one).

The sums over j are products of a with second moments of the keys, so no T x T matrix of a pair
exists.  Invariants the tests check: equal to loops over i and j; a pair that does not turn loses
nothing; the residual is not above that of m = 1.

Legend: T tokens, I queries of which sums are taken, P pairs, H query heads, G KV heads, F = 4
features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PLAIN, PLAIN_TURNED, ROTARY, FOLDED = range(4)
"""The features: Re z, -Im z, y, and y at another frequency."""
FOLD_STRIDE = 2
"""Neighbouring pairs that share the frequency of the first in the fourth feature."""
_TINY = 1e-9
"""Weight of "leave the query as it is" where a pair's features say next to nothing."""


def contribution_grams(
    probabilities_IT: Tensor,
    *,
    query_IP: Tensor,
    positions_I: Tensor,
    key_TP: Tensor,
    frequencies_P: Tensor,
) -> Tensor:
    """Sums over queries and keys [P, F, F] of attention-weighted products of centred features.

    query_IP, key_TP: complex pairs of one head before RoPE, the logit's scale in one of them; keys
        are at positions 0 to T - 1.
    """
    positions_T = torch.arange(len(key_TP))
    queries, keys = [query_IP], [key_TP]
    first_P = torch.arange(len(frequencies_P)) // FOLD_STRIDE * FOLD_STRIDE
    for turning_P in (frequencies_P, frequencies_P[first_P]):
        queries.append(_turned(query_IP, positions_I, turning_P))
        keys.append(_turned(key_TP, positions_T, turning_P))
    key_TPX = torch.view_as_real(torch.stack(keys, dim=-1)).flatten(-2)
    key_TPX = key_TPX - key_TPX.mean(0)  # the same for every key, so nothing changes but rounding
    moment_IPXX = _weighted(probabilities_IT, key_TPX[..., :, None] * key_TPX[..., None, :])
    mean_IPX = _weighted(probabilities_IT, key_TPX)
    covariance_IPXX = moment_IPXX - mean_IPX[..., :, None] * mean_IPX[..., None, :]
    feature_IPFX = _features(*queries)
    return torch.einsum("ipfx,ipxy,ipgy->pfg", feature_IPFX, covariance_IPXX, feature_IPFX)


def _turned(x_TP: Tensor, positions_T: Tensor, frequencies_P: Tensor) -> Tensor:
    """RoPE of complex pairs."""
    real = x_TP.real.dtype
    angles_TP = positions_T[:, None].to(real) * frequencies_P.to(real)
    return x_TP * torch.polar(torch.ones_like(angles_TP), angles_TP)


def _weighted(probabilities_IT: Tensor, values: Tensor) -> Tensor:
    """Means of values [T, ...] under every row of probabilities: [I, ...]."""
    return (probabilities_IT @ values.flatten(1)).unflatten(1, values.shape[1:])


def _features(query_IP: Tensor, turned_IP: Tensor, folded_IP: Tensor) -> Tensor:
    """Each feature as a linear function of the key's three complex numbers: [I, P, F, 6]."""
    zero_IP = torch.zeros_like(query_IP)
    rows = [
        (query_IP, zero_IP, zero_IP),
        (query_IP * -1j, zero_IP, zero_IP),  # Re(conj(-1j q) k) = Re(1j z) = -Im z
        (zero_IP, turned_IP, zero_IP),
        (zero_IP, zero_IP, folded_IP),
    ]
    complex_IPFX = torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)
    return torch.view_as_real(complex_IPFX).flatten(-2)


@dataclass(frozen=True, kw_only=True)
class LogitResiduals:
    """What dropping each pair's rotation costs a query head, and the factor that costs least."""

    factor_HP: Tensor
    """m, complex: a query without rotation is multiplied by its conjugate."""
    compensated_HP: Tensor
    """Residual with the factor; >= 0, a sum over queries of squared logits."""
    plain_HP: Tensor
    """Residual with m = 1."""
    folded_HP: Tensor
    """Residual if the pair turns at the other frequency instead of its own."""
    total_HP: Tensor
    """Of nothing in the pair's place."""

    @classmethod
    def of(cls, gram_HPFF: Tensor) -> LogitResiduals:
        """From sums of `contribution_grams` for every head."""
        pair_HPmm = gram_HPFF[..., :2, :2]
        target_HPm = gram_HPFF[..., :2, ROTARY]
        total_HP = gram_HPFF[..., ROTARY, ROTARY]
        one = torch.tensor([1.0, 0.0], dtype=gram_HPFF.dtype)
        size_HP = pair_HPmm.diagonal(dim1=-2, dim2=-1).sum(-1)
        ridge = torch.eye(2, dtype=gram_HPFF.dtype) * (_TINY * size_HP + 1e-300)[..., None, None]
        change_HPm = torch.linalg.solve(pair_HPmm + ridge, target_HPm - pair_HPmm[..., 0])
        factor_HPm = one + change_HPm
        explained_HP = 2 * (factor_HPm * target_HPm).sum(-1) - torch.einsum(
            "...m,...mn,...n->...", factor_HPm, pair_HPmm, factor_HPm
        )
        plain_HP = total_HP - 2 * target_HPm[..., 0] + pair_HPmm[..., 0, 0]
        folded_HP = total_HP - 2 * gram_HPFF[..., ROTARY, FOLDED] + gram_HPFF[..., FOLDED, FOLDED]
        return cls(
            factor_HP=torch.complex(factor_HPm[..., 0], factor_HPm[..., 1]),
            compensated_HP=(total_HP - explained_HP).clamp(min=0),
            plain_HP=plain_HP.clamp(min=0),
            folded_HP=folded_HP.clamp(min=0),
            total_HP=total_HP,
        )

    def scores(self, *, num_groups: int, is_compensated: bool) -> Tensor:
        """Loss of every pair [G, P], summed over the heads of each group."""
        residual_HP = self.compensated_HP if is_compensated else self.plain_HP
        return residual_HP.unflatten(0, (num_groups, -1)).sum(1)
