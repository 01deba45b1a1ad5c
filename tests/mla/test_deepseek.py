"""Directions of a shared rotary key: what they maximise, and the base that stock engines need."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.mla.deepseek import (
    energy_directions,
    engine_theta,
    key_moment,
    residual_directions,
)
from megatron_ext.mla.forward import heads
from megatron_ext.mla.logit_residual import LogitResiduals
from megatron_ext.mla.rotary_pairs import frequencies
from megatron_ext.weights.architecture import Rope
from tests.mla.cases import Case


@pytest.mark.parametrize("name", ["gqa", "biased"])
def test_the_moment_of_keys_is_that_of_the_tokens(name):
    case = Case(name)
    keys_GTP = case.pairs.as_complex(heads(case.layer, case.x_TD).key_GTW)
    chosen = torch.tensor([1, 4])
    channels_Tn = keys_GTP[..., chosen].permute(1, 0, 2).flatten(1)
    expected = channels_Tn.T @ channels_Tn.conj() / len(case.x_TD)
    torch.testing.assert_close(key_moment(case.layer, case.statistics(), chosen), expected)


@pytest.mark.parametrize("fold", [1, 2])
def test_energy_directions_are_the_principal_real_ones(fold):
    case = Case("gqa")
    statistics = case.statistics()
    shared = energy_directions(case.layer, statistics, num_slots=2, stride=1, fold=fold)
    assert torch.equal(shared.read_KGP, shared.write_KGP)
    assert float(shared.read_KGP.imag.abs().max()) == 0
    products = torch.einsum("kgp,lgp->kl", shared.read_KGP, shared.read_KGP)
    torch.testing.assert_close(products, torch.eye(2).to(products.dtype))
    keys_GTP = case.pairs.as_complex(heads(case.layer, case.x_TD).key_GTW)
    slots_TK = torch.einsum("kgp,gtp->tk", shared.read_KGP.conj(), keys_GTP)
    energy = float(slots_TK.abs().square().sum()) / len(case.x_TD)
    draw = torch.Generator().manual_seed(0)
    for _ in range(50):  # no other real directions within the folds have more
        other = torch.zeros(2, 2, case.pairs.count, dtype=torch.float64)
        for first in range(0, 2, fold):
            random = torch.randn(2 * fold, fold, generator=draw, dtype=torch.float64)
            unit, _ = torch.linalg.qr(random)
            other[first : first + fold, :, first : first + fold] = unit.T.view(fold, 2, fold)
        slots_TK = torch.einsum("kgp,gtp->tk", other.to(keys_GTP.dtype), keys_GTP)
        assert float(slots_TK.abs().square().sum()) / len(case.x_TD) <= energy * (1 + 1e-9)


def test_weighted_directions_keep_more_of_what_rotation_does():
    case = Case("gqa")
    statistics = case.statistics()
    residuals = LogitResiduals.of(statistics.gram_HPFF)
    options = {"num_slots": 3, "is_compensated": True}
    losses = [
        residual_directions(case.layer, statistics, residuals, stride=stride, **options).loss
        for stride in (1, 2)
    ]
    total = float(residuals.compensated_HP.sum())
    assert all(0 < loss < 2 * total for loss in losses)
    more = residual_directions(
        case.layer, statistics, residuals, num_slots=6, stride=1, is_compensated=True
    )
    assert more.loss < losses[0]
    none = residual_directions(
        case.layer, statistics, residuals, num_slots=0, stride=1, is_compensated=True
    )
    assert none.loss == pytest.approx(total)


@pytest.mark.parametrize(("slots", "stride"), [(16, 2), (16, 1), (32, 1), (8, 3)])
def test_an_engine_finds_the_frequencies_from_its_base(slots, stride):
    rope = Rope(theta=1e5)
    theta = engine_theta(rope, num_pairs=32, num_slots=slots, stride=stride)
    engine_K = theta ** (-torch.arange(slots, dtype=torch.float64) / slots)
    expected = frequencies(rope, width=64)[torch.arange(slots) * stride]
    torch.testing.assert_close(engine_K.float(), expected)
    if (slots, stride) == (16, 2):
        assert theta == 1e5


def test_no_base_gives_scaled_frequencies():
    rope = Rope(kind="llama3", theta=5e5, factor=8.0, original_positions=8192)
    with pytest.raises(ValueError, match=r"rope_type 'llama3': .* from a base alone"):
        engine_theta(rope, num_pairs=64, num_slots=32, stride=2)


@pytest.mark.parametrize(
    ("slots", "stride", "fold", "message"),
    [
        (4, 2, 2, "--rope-pairs 4 with --rope-stride 2: .* 8 of the 6 .* --rope-pairs 0 to 3"),
        (3, 1, 2, "--rope-fold 2 with --rope-stride 1 and --rope-pairs 3"),
        (2, 2, 3, "--rope-fold 3 with --rope-stride 2"),
    ],
)
def test_slots_that_do_not_fit_are_refused(slots, stride, fold, message):
    case = Case("gqa")
    with pytest.raises(ValueError, match=message):
        energy_directions(case.layer, case.statistics(), num_slots=slots, stride=stride, fold=fold)
