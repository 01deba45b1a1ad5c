"""The best product of two thin matrices in the place of a weight: joint keys and values, or each.

Minimised is E_j w_j | M^(1/2) (W - U D) x_j |^2 with W = [keys; values], the token weights w_j in a
second moment C = E[w x x^T], and a metric M that says what an error of each row costs.  With
C = L L^T and the SVD M^(1/2) W L = P S Q^T the optimum is D = Q_R^T L^-1, U = M^(-1/2) P_R S_R, and
the minimum is the sum of the squared singular values left out (Eckart and Young 1936; whitening as
in SVD-LLM, arXiv 2403.07378).  Without C and M it is the joint SVD of MHA2MLA (arXiv 2502.14837),
all singular values on the side of U as in the authors' code.
Linear algebra is float64 whatever the weights are.  Invariants the tests check: the minimum is the
tail and no other pair of matrices is below it; at full rank the product is the weight.

Legend: M rows of the weight, D its columns, R rank, I the smaller of M and D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.mla.config import RidgeOn

_FLOOR = 1e-8
"""Singular values below this share of the largest are noise of the eigenvalues they come from."""


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """W ~ up @ down."""

    up_MR: Tensor
    down_RD: Tensor
    singular_values_I: Tensor
    """Of M^(1/2) W L, descending; float64."""

    @property
    def tail(self) -> float:
        """The minimum: what is lost, in the units of the objective."""
        return float(self.singular_values_I[len(self.down_RD) :].square().sum())

    @property
    def tail_share(self) -> float:
        """The tail as a share of what there is."""
        total = float(self.singular_values_I.square().sum())
        return self.tail / total if total else 0.0


def factorise(
    weight_MD: Tensor,
    *,
    rank: int,
    moment_DD: Tensor | None = None,
    roots: Sequence[Tensor] = (),
    ridge: float = 0.0,
    ridge_on: RidgeOn = "inputs",
) -> LowRank:
    """The best rank-R product; float64, and the latent has unit moments under C.

    moment_DD: C; None = the identity.
    roots: M^(1/2) as blocks on its diagonal, symmetric, positive, of the rows from top to bottom;
        none = the identity.
    ridge: share of its mean eigenvalue that is added to C, so that few tokens do.
    ridge_on: "outputs" = to W C W^T instead, as in principal components of the outputs: its
        eigenvectors stay, so neither the ridge nor a C that is singular matters.

    Raises:
        ValueError: the rank is not from 1 to I, or C is not positive (with its ridge).
    """
    limit = min(weight_MD.shape)
    if not 1 <= rank <= limit:
        raise ValueError(
            f"rank {rank} of a latent: keys and values of this layer have {weight_MD.shape[0]} "
            f"rows and {weight_MD.shape[1]} columns, so ranks are from 1 to {limit}. Change "
            "--kv-rank, --kv-dims-per-head or --cache-ratio."
        )
    scaled_MD = times_blocks(roots, weight_MD.double())
    if ridge_on == "outputs" and moment_DD is not None:
        return _principal(scaled_MD, moment_DD.double(), rank=rank, roots=roots)
    lower_DD = None if moment_DD is None else cholesky(moment_DD, ridge=ridge)
    whole_MD = scaled_MD if lower_DD is None else scaled_MD @ lower_DD
    if weight_MD.shape[0] <= weight_MD.shape[1]:
        values_I, left_MM = _eigen(whole_MD @ whole_MD.T)
        sizes_R = values_I[:rank].clamp(min=float(values_I[0]) * _FLOOR + 1e-300)
        down_RD = (left_MM[:, :rank] / sizes_R).T @ scaled_MD
        up_MR = left_MM[:, :rank] * sizes_R
    else:
        values_I, right_DD = _eigen(whole_MD.T @ whole_MD)
        up_MR = whole_MD @ right_DD[:, :rank]
        down_RD = right_DD[:, :rank].T
        if lower_DD is not None:
            down_RD = torch.linalg.solve_triangular(lower_DD, down_RD, upper=False, left=False)
    return LowRank(up_MR=over_blocks(roots, up_MR), down_RD=down_RD, singular_values_I=values_I)


def _principal(
    scaled_MD: Tensor, moment_DD: Tensor, *, rank: int, roots: Sequence[Tensor]
) -> LowRank:
    """By the principal directions of M^(1/2) W x; nothing of C is inverted."""
    values_M, left_MM = _eigen(scaled_MD @ moment_DD @ scaled_MD.T)
    sizes_R = values_M[:rank].clamp(min=float(values_M[0]) * _FLOOR + 1e-300)
    return LowRank(
        up_MR=over_blocks(roots, left_MM[:, :rank] * sizes_R),
        down_RD=(left_MM[:, :rank] / sizes_R).T @ scaled_MD,
        singular_values_I=values_M[: min(scaled_MD.shape)],
    )


def _eigen(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Singular values and vectors of A from A A^T, largest first."""
    values, vectors = torch.linalg.eigh(gram)
    return values.clamp(min=0).sqrt().flip(0), vectors.flip(1)


def damped(moment_DD: Tensor, *, ridge: float) -> Tensor:
    """The moment with a share of its mean eigenvalue added to all of them, float64."""
    size = len(moment_DD)
    addition = ridge * float(moment_DD.double().trace()) / size
    return moment_DD.double() + addition * torch.eye(size, dtype=torch.float64)


def cholesky(moment_DD: Tensor, *, ridge: float) -> Tensor:
    """Lower L with L L^T = the damped moment.

    Raises:
        ValueError: it is not positive definite.
    """
    lower_DD, failed = torch.linalg.cholesky_ex(damped(moment_DD, ridge=ridge))
    if failed or not torch.isfinite(lower_DD).all():
        raise ValueError(
            f"the second moment of {len(moment_DD)} widths is not positive definite with "
            f"--moment-ridge {ridge:g}. Calibrate on more tokens than widths, or raise the ridge."
        )
    return lower_DD


def times_blocks(blocks: Sequence[Tensor], matrix_MX: Tensor) -> Tensor:
    """The block-diagonal matrix times another one; no blocks = the identity."""
    if not blocks:
        return matrix_MX
    parts = matrix_MX.split([len(block) for block in blocks])
    return torch.cat([block @ part for block, part in zip(blocks, parts, strict=True)])


def over_blocks(blocks: Sequence[Tensor], matrix_MX: Tensor) -> Tensor:
    """The inverse of the block-diagonal matrix times another one."""
    if not blocks:
        return matrix_MX
    parts = matrix_MX.split([len(block) for block in blocks])
    solve = torch.linalg.solve
    return torch.cat([solve(block, part) for block, part in zip(blocks, parts, strict=True)])


def tempered_root(metric_XX: Tensor, *, exponent: float, damping: float) -> Tensor:
    """M^(exponent / 2), M damped by a share of its mean eigenvalue; exponent 0 = the identity.

    Exponents below 1 trust the small eigenvalues of an estimated metric less.
    """
    values_X, vectors_XX = torch.linalg.eigh(metric_XX.double())
    values_X = values_X.clamp(min=0)
    powers_X = (values_X + damping * values_X.mean() + 1e-30) ** (exponent / 2)
    return (vectors_XX * powers_X) @ vectors_XX.T


def energy(weight_MD: Tensor, moment_DD: Tensor | None) -> float:
    """E | W x |^2, or the squared Frobenius norm without a moment."""
    weight_MD = weight_MD.double()
    seen_MD = weight_MD if moment_DD is None else weight_MD @ moment_DD
    return float((seen_MD * weight_MD).sum())


def mean_row_size(weight_MD: Tensor, moment_DD: Tensor | None) -> float:
    """Mean over rows of sqrt(E (w x)^2)."""
    weight_MD = weight_MD.double()
    seen_MD = weight_MD if moment_DD is None else weight_MD @ moment_DD
    return float((seen_MD * weight_MD).sum(-1).clamp(min=0).sqrt().mean())
