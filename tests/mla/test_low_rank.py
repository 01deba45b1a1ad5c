"""Low rank: the minimum is the tail of singular values, and nothing is below it (E4, E5, E14)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.mla.config import MLAConfig
from megatron_ext.mla.convert import split_layer
from megatron_ext.mla.forward import head_logits, heads
from megatron_ext.mla.latent import Latent, compress, output_metric
from megatron_ext.mla.low_rank import (
    damped,
    energy,
    factorise,
    over_blocks,
    tempered_root,
    times_blocks,
)
from megatron_ext.mla.presets import preset
from tests.mla.cases import PLAIN, Case

RIDGE = 1e-3


def random(*size: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=draw, dtype=torch.float64)


def moment(size: int, *, seed: int = 1) -> Tensor:
    """Second moment of correlated activations."""
    scale = torch.logspace(0, -2, size, dtype=torch.float64)
    x = random(3 * size, size, seed=seed) * scale @ random(size, size, seed=seed + 1)
    return x.T @ x


def roots(sizes: list[int]) -> list[Tensor]:
    return [
        tempered_root(random(n, n, seed=n) @ random(n, n, seed=n).T, exponent=0.7, damping=0.01)
        for n in sizes
    ]


OBJECTIVES: dict[str, dict[str, Any]] = {
    "plain": {},
    "whitened": {"moment_DD": moment(12), "ridge": RIDGE},
    "metric": {"moment_DD": moment(12), "ridge": RIDGE, "roots": roots([4, 3, 2])},
    "tall": {"moment_DD": moment(12), "ridge": RIDGE, "roots": roots([10, 3, 2, 5])},
}


def lost(weight_MD: Tensor, product_MD: Tensor, objective: dict[str, Any]) -> float:
    """The objective, by its definition."""
    error_MD = weight_MD - product_MD
    blocks = objective.get("roots", [])
    error_MD = torch.block_diag(*blocks) @ error_MD if blocks else error_MD
    moment_DD = objective.get("moment_DD", torch.eye(12).double())
    return float((error_MD @ damped(moment_DD, ridge=objective.get("ridge", 0.0)) * error_MD).sum())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_error_is_the_tail_and_the_least_there_is(name):
    objective = OBJECTIVES[name]
    weight_MD = random(20 if name == "tall" else 9, 12)
    errors = []
    for rank in (1, 4, 8):
        found = factorise(weight_MD, rank=rank, **objective)
        error = lost(weight_MD, found.up_MR @ found.down_RD, objective)
        assert error == pytest.approx(found.tail, rel=1e-6)
        assert found.tail_share == pytest.approx(error / lost(weight_MD, weight_MD * 0, objective))
        for seed in range(100):
            # the best up for a random down, so that the competitor is a good one
            down_RD = random(rank, 12, seed=seed) + found.down_RD * (seed % 3)
            seen_DD = damped(objective.get("moment_DD", torch.eye(12).double()), ridge=RIDGE)
            up_MR = torch.linalg.solve(
                down_RD @ seen_DD @ down_RD.T, down_RD @ seen_DD @ weight_MD.T
            )
            assert lost(weight_MD, up_MR.T @ down_RD, objective) >= error * (1 - 1e-9)
        errors.append(error)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.5 * errors[0]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_full_rank_is_exact_and_the_latent_has_unit_moments(name):
    objective = OBJECTIVES[name]
    weight_MD = random(20 if name == "tall" else 9, 12)
    found = factorise(weight_MD, rank=min(weight_MD.shape), **objective)
    torch.testing.assert_close(found.up_MR @ found.down_RD, weight_MD, rtol=0, atol=1e-10)
    seen_DD = damped(objective.get("moment_DD", torch.eye(12).double()), ridge=RIDGE)
    if "moment_DD" not in objective:
        seen_DD = torch.eye(12).double()
    unit = found.down_RD @ seen_DD @ found.down_RD.T
    torch.testing.assert_close(unit, torch.eye(len(unit)).double(), rtol=0, atol=1e-8)


def test_the_plain_svd_is_that_of_torch_and_sides_agree():
    weight_MD = random(9, 12)
    left, values, right = torch.linalg.svd(weight_MD, full_matrices=False)
    product = (left[:, :5] * values[:5]) @ right[:5]
    wide = factorise(weight_MD, rank=5)
    tall = factorise(weight_MD.T, rank=5)
    torch.testing.assert_close(wide.singular_values_I, values)
    torch.testing.assert_close(wide.up_MR @ wide.down_RD, product)
    torch.testing.assert_close((tall.up_MR @ tall.down_RD).T, product)


def test_degenerate_weights_and_moments():
    low_MD = random(9, 3) @ random(3, 12, seed=4)
    found = factorise(low_MD, rank=6, moment_DD=moment(12), ridge=RIDGE)
    torch.testing.assert_close(found.up_MR @ found.down_RD, low_MD, rtol=0, atol=1e-9)
    equal = factorise(torch.eye(6).double(), rank=3)  # all singular values the same
    assert equal.tail == pytest.approx(3)
    x_TD = random(4, 12)  # fewer tokens than widths
    few = factorise(random(9, 12), rank=5, moment_DD=x_TD.T @ x_TD / 4, ridge=RIDGE)
    assert torch.isfinite(few.up_MR).all() and torch.isfinite(few.down_RD).all()
    seen = (random(9, 12) - few.up_MR @ few.down_RD) @ x_TD.T
    assert float(seen.square().sum()) < 0.02 * float((random(9, 12) @ x_TD.T).square().sum())
    zero = factorise(torch.zeros(9, 12), rank=2)
    assert zero.tail_share == 0 and torch.isfinite(zero.down_RD).all()
    with pytest.raises(ValueError, match="not positive definite with --moment-ridge 0"):
        factorise(random(9, 12), rank=2, moment_DD=x_TD.T @ x_TD, ridge=0.0)


@pytest.mark.parametrize("rank", [0, 10])
def test_impossible_ranks_are_refused(rank):
    with pytest.raises(ValueError, match=rf"rank {rank} of a latent: .* from 1 to 9\. Change"):
        factorise(random(9, 12), rank=rank)


def test_tempered_roots():
    metric = random(5, 5) @ random(5, 5).T
    whole = tempered_root(metric, exponent=1.0, damping=0.0)
    torch.testing.assert_close(whole @ whole, metric)
    half = tempered_root(metric, exponent=0.5, damping=0.0)
    torch.testing.assert_close(half @ half, whole)
    eye = torch.eye(5).double()
    torch.testing.assert_close(tempered_root(metric, exponent=0.0, damping=0.1), eye)
    blocks, matrix = [whole, half[:5]], random(10, 3)
    torch.testing.assert_close(times_blocks(blocks, matrix), torch.block_diag(*blocks) @ matrix)
    torch.testing.assert_close(over_blocks(blocks, times_blocks(blocks, matrix)), matrix)
    assert times_blocks([], matrix) is matrix and over_blocks([], matrix) is matrix


def objective_of(case: Case, latent: Latent, config: MLAConfig) -> float:
    """Whitened error of keys and values, without balance or metric."""
    statistics = case.statistics()
    split, _ = split_layer(case.layer, config=config, statistics=statistics)
    seen_DD = damped(statistics.moment(), ridge=config.moment_ridge)
    keys = split.key_plain_GND - latent.key_up_GNR @ latent.down_RD
    values = case.layer.value_GVD - latent.value_up_GVR @ latent.down_RD
    return energy(keys.flatten(0, 1), seen_DD) + energy(values.flatten(0, 1), seen_DD)


@pytest.mark.parametrize("rank", [4, 10, 16])
def test_joint_is_not_worse_than_split_at_the_same_cache(rank):
    case = Case("gqa")
    joint = preset("whitened", rope_pairs=2, rope_compensation=False)
    losses = {}
    for name, config in {"joint": joint, "split": replace(joint, kv_split=True)}.items():
        split, _ = split_layer(case.layer, config=config, statistics=case.statistics())
        latent = compress(split, case.layer, config=config, rank=rank, statistics=case.statistics())
        assert len(latent.down_RD) == rank
        losses[name] = objective_of(case, latent, config)
        if name == "joint":
            tail = float(latent.singular_values[rank:].square().sum())
            assert losses[name] == pytest.approx(tail, rel=1e-6)
        else:
            half = rank // 2
            assert latent.key_up_GNR[..., half:].count_nonzero() == 0
            assert latent.value_up_GVR[..., :half].count_nonzero() == 0
    assert losses["joint"] <= losses["split"]


def test_the_balance_moves_the_error_from_values_to_keys():
    case = Case("gqa")
    case.layer = replace(case.layer, key_GWD=10 * case.layer.key_GWD)
    errors = []
    for balance in ("none", "energy", "channel-rms"):
        config = preset("whitened", rope_strategy="high", rope_pairs=2, kv_balance=balance)
        statistics = case.statistics()
        split, _ = split_layer(case.layer, config=config, statistics=statistics)
        latent = compress(split, case.layer, config=config, rank=10, statistics=statistics)
        lost = case.layer.value_GVD - latent.value_up_GVR @ latent.down_RD
        errors.append(energy(lost.flatten(0, 1), statistics.moment()))
    assert errors[1] < 0.7 * errors[0]
    assert errors[2] < 0.7 * errors[0]


def test_the_metric_is_its_definition():
    case = Case("gqa")
    config = replace(PLAIN, rope_pairs=2)
    statistics = case.statistics()
    split, _ = split_layer(case.layer, config=config, statistics=statistics)
    keys_GNN, values_GVV = output_metric(split, case.layer, statistics)
    tokens, layer = len(case.x_TD), case.layer
    found = heads(layer, case.x_TD)
    expected_keys, expected_values = torch.zeros_like(keys_GNN), torch.zeros_like(values_GVV)
    for head, logits_TT in enumerate(head_logits(layer, found)):
        group, a_TT = head // 2, logits_TT.softmax(-1)
        output_DV, value_TV = layer.output_DHV[:, head], found.value_GTV[head // 2]
        for i in range(tokens):
            mean_V = a_TT[i] @ value_TV
            change = [(output_DV @ (value_TV[j] - mean_V)).square().sum() for j in range(tokens)]
            beta = sum(a_TT[i, j] ** 2 * change[j] for j in range(tokens))
            q_N = found.query_HTW[head, i] @ split.query_plain_HWN[head]
            expected_keys[group] += beta * torch.outer(q_N, q_N) * layer.softmax_scale**2 / tokens
            alpha = a_TT[i].square().sum()
            expected_values[group] += alpha * output_DV.T @ output_DV / tokens
    torch.testing.assert_close(keys_GNN, expected_keys)
    torch.testing.assert_close(values_GVV, expected_values)
