"""M1: residuals and factors equal loops over queries and keys, and are the best there are."""

from __future__ import annotations

import cmath
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_ext.mla.logit_residual import LogitResiduals, contribution_grams
from megatron_ext.mla.selection import pairs_by_score
from tests.mla.cases import Case


def attention(tokens: int, *, seed: int = 0) -> Tensor:
    """Causal probabilities [T, T]."""
    draw = torch.Generator().manual_seed(seed)
    logits_TT = torch.randn(tokens, tokens, generator=draw, dtype=torch.float64)
    later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    return logits_TT.masked_fill(later, -torch.inf).softmax(-1)


def pairs(tokens: int, count: int, *, seed: int) -> Tensor:
    """Complex [T, P] with a mean far from zero."""
    draw = torch.Generator().manual_seed(seed)
    real, imaginary = torch.randn(2, tokens, count, generator=draw, dtype=torch.float64)
    return torch.complex(real + 2, imaginary - 1)


def centred_features(a_TT: Tensor, q_T: list, k_T: list, *, turn: float, fold: float) -> list:
    """(a_ij, the four features of i and j, centred) by their definitions."""
    found = []
    for i in range(len(q_T)):
        rows = []
        for j in range(i + 1):
            z = q_T[i].conjugate() * k_T[j]
            y, y_folded = ((z * cmath.exp(1j * f * (j - i))).real for f in (turn, fold))
            rows.append((float(a_TT[i, j]), [z.real, -z.imag, y, y_folded]))
        means = [sum(a * features[n] for a, features in rows) for n in range(4)]
        found += [
            (a, [f - m for f, m in zip(features, means, strict=True)]) for a, features in rows
        ]
    return found


def test_grams_are_sums_over_queries_and_keys():
    a_TT, q_TP, k_TP = attention(7), pairs(7, 3, seed=1), pairs(7, 3, seed=2)
    turns = [1.0, 0.4, 0.1]
    gram_PFF = contribution_grams(
        a_TT,
        query_IP=q_TP,
        positions_I=torch.arange(len(q_TP)),
        key_TP=k_TP,
        frequencies_P=torch.tensor(turns, dtype=torch.float64),
    )
    for pair, fold in enumerate([1.0, 1.0, 0.1]):
        rows = centred_features(
            a_TT, q_TP[:, pair].tolist(), k_TP[:, pair].tolist(), turn=turns[pair], fold=fold
        )
        for n in range(4):
            for m in range(4):
                expected = sum(a * features[n] * features[m] for a, features in rows)
                assert float(gram_PFF[pair, n, m]) == pytest.approx(expected, abs=1e-10)


def test_the_factor_is_the_best_and_residuals_are_what_is_left():
    a_TT, q_TP, k_TP = attention(9), pairs(9, 1, seed=1), pairs(9, 1, seed=2)
    turn = torch.tensor([0.3], dtype=torch.float64)
    gram_PFF = contribution_grams(
        a_TT, query_IP=q_TP, positions_I=torch.arange(len(q_TP)), key_TP=k_TP, frequencies_P=turn
    )
    found = LogitResiduals.of(gram_PFF[None])
    rows = centred_features(a_TT, q_TP[:, 0].tolist(), k_TP[:, 0].tolist(), turn=0.3, fold=0.3)

    def left(m: complex) -> float:
        return sum(a * (f[2] - m.real * f[0] - m.imag * f[1]) ** 2 for a, f in rows)

    best = complex(found.factor_HP[0, 0])
    assert left(best) == pytest.approx(float(found.compensated_HP[0, 0]), rel=1e-6)
    assert left(1) == pytest.approx(float(found.plain_HP[0, 0]), rel=1e-9)
    assert left(0) == pytest.approx(float(found.total_HP[0, 0]), rel=1e-9)
    for step in (1e-3, -1e-3, 1e-3j, -1e-3j):
        assert left(best + step) > left(best)
    assert float(found.folded_HP[0, 0]) == pytest.approx(0, abs=1e-12)


def test_a_pair_that_does_not_turn_loses_nothing_and_a_dead_one_keeps_its_query():
    a_TT, q_TP, k_TP = attention(6), pairs(6, 2, seed=1), pairs(6, 2, seed=2)
    k_TP[:, 1] = 0
    gram_PFF = contribution_grams(
        a_TT,
        query_IP=q_TP,
        positions_I=torch.arange(len(q_TP)),
        key_TP=k_TP,
        frequencies_P=torch.tensor([0.0, 1.0]),
    )
    found = LogitResiduals.of(gram_PFF[None])
    torch.testing.assert_close(found.factor_HP[0], torch.ones(2, dtype=torch.complex128))
    assert found.compensated_HP.abs().max() < 1e-10
    assert found.plain_HP.abs().max() < 1e-10


@pytest.mark.parametrize("name", ["gqa", "yarn", "normed"])
def test_statistics_of_a_layer_choose_what_loops_choose(name):
    case = Case(name)
    statistics = case.statistics()
    found = LogitResiduals.of(statistics.gram_HPFF)
    assert bool((found.compensated_HP <= found.plain_HP + 1e-12).all())
    scores_GP = found.scores(num_groups=2, is_compensated=True)
    by_head = found.compensated_HP.view(2, 2, -1)
    torch.testing.assert_close(scores_GP, by_head[:, 0] + by_head[:, 1])
    kept_GK = pairs_by_score(scores_GP, kept=2)
    for group in range(2):
        assert set(kept_GK[group].tolist()) == set(scores_GP[group].argsort()[-2:].tolist())


def test_one_dropped_pair_changes_attention_as_much_as_predicted():
    """A slow pair's residual is twice the KL divergence of the attention rows, to second order."""
    case = Case("gqa")
    slow = case.layer.pairs.frequencies_P * 0.01
    case.layer = _with_frequencies(case, slow)
    statistics = case.statistics()
    found = LogitResiduals.of(statistics.gram_HPFF)
    pair = int(found.plain_HP[0].argmax())
    before_TT, after_TT = (
        _row_logits(case, frequencies_P).log_softmax(-1)
        for frequencies_P in (slow, slow.index_fill(0, torch.tensor([pair]), 0.0))
    )
    lower = torch.ones_like(before_TT, dtype=torch.bool).tril()
    change_TT = torch.where(lower, before_TT - after_TT, 0.0)
    divergence = float((before_TT.exp() * change_TT).sum())
    assert divergence == pytest.approx(float(found.plain_HP[0, pair]) / 2, rel=0.05)


def _with_frequencies(case: Case, frequencies_P: Tensor):
    pairs = replace(case.layer.pairs, frequencies_P=frequencies_P)
    return replace(case.layer, pairs=pairs)


def _row_logits(case: Case, frequencies_P: Tensor) -> Tensor:
    """Causal logits of head 0, by the pairs' angles."""
    layer, tokens = case.layer, len(case.x_TD)
    q_TW, k_TW = case.x_TD @ layer.query_HWD[0].T, case.x_TD @ layer.key_GWD[0].T
    q_TP, k_TP = layer.pairs.as_complex(q_TW), layer.pairs.as_complex(k_TW)
    t = torch.arange(tokens, dtype=torch.float64)
    logits_TT = torch.zeros(tokens, tokens, dtype=torch.float64)
    for pair, frequency in enumerate(frequencies_P.tolist()):
        turn_TT = torch.exp(1j * frequency * (t - t[:, None]))
        z_TT = q_TP[:, pair].conj()[:, None] * k_TP[:, pair]
        logits_TT += (z_TT * turn_TT).real
    later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    return (logits_TT * layer.softmax_scale).masked_fill(later, -torch.inf)
