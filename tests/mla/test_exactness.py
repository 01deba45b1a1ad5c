"""Converted layers equal the original, or the original whose dropped pairs stand still (E1, E2)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.mla.convert import assemble, convert_layer
from megatron_ext.mla.deepseek import SharedKey, residual_directions, split_shared
from megatron_ext.mla.forward import latent_head_outputs, latent_heads
from megatron_ext.mla.latent import compress
from megatron_ext.mla.layers import AttentionLayer, LatentLayer
from megatron_ext.mla.logit_residual import LogitResiduals
from megatron_ext.mla.paper import split_heads
from megatron_ext.mla.presets import preset
from megatron_ext.mla.sizes import cache_of
from megatron_ext.mla.statistics import sequence_statistics
from megatron_ext.weights.architecture import Rope
from tests.mla.cases import EXACT, PLAIN, Case
from tests.mla.reference import MODELS, latent_attention


def assert_equal(layer: LatentLayer, x_TD: Tensor, expected_TD: Tensor, **tolerance: float) -> None:
    tolerance = tolerance or EXACT
    torch.testing.assert_close(latent_attention(layer, x_TD), expected_TD, **tolerance)


@pytest.mark.parametrize("method", ["paper-joint", "paper-split", "transmla", "best"])
@pytest.mark.parametrize("name", MODELS)
def test_all_pairs_and_full_rank_are_the_original(name, method):
    case = Case(name)
    options: dict[str, Any] = {"rope_pairs": case.pairs.count}
    if case.shape.qk_norm:
        options |= {"rope_compensation": False, "query_refit_steps": 0}
    layer = case.convert(preset(method, **options))
    # refits pull towards an exact start and find nothing to gain but rounding, times 1 / ridge
    tolerance = {"rtol": 0, "atol": 1e-7} if method == "best" else EXACT
    assert_equal(layer, case.x_TD, case.original(), **tolerance)


@pytest.mark.parametrize("strategy", ["high", "low", "uniform", "2-norm", "residual"])
@pytest.mark.parametrize("name", MODELS)
def test_dropped_pairs_stand_still(name, strategy):
    case = Case(name)
    kept = case.pairs.count // 2
    config = replace(PLAIN, rope_strategy=strategy, rope_pairs=kept)
    layer, report = convert_layer(
        case.layer, config=config, rank=case.rank(config), statistics=case.statistics()
    )
    turns_GP = torch.zeros(case.shape.num_groups, case.pairs.count, dtype=torch.bool)
    turns_GP.scatter_(1, report.pairs_BK, True)
    assert int(turns_GP.sum()) == kept * case.shape.num_groups
    assert_equal(layer, case.x_TD, case.original(turns_GP=turns_GP))
    changed = (case.original(turns_GP=turns_GP) - case.original()).abs().max()
    assert changed > 1e-3, "the pairs that stand still change nothing: the test proves nothing"
    assert report.key_error < 1e-12 and report.value_error < 1e-12


@pytest.mark.parametrize("name", ["gqa", "biased", "yarn", "half rotary, interleaved"])
def test_random_pairs_with_factors(name):
    case = Case(name)
    draw = torch.Generator().manual_seed(3)
    order_GP = torch.rand(case.shape.num_groups, case.pairs.count, generator=draw).argsort(-1)
    kept_GK = order_GP[:, :2].sort(-1).values
    assert not torch.equal(kept_GK[0], kept_GK[1]), "the sets of the heads should differ"
    residuals = LogitResiduals.of(case.statistics().gram_HPFF)
    split = split_heads(case.layer, kept_GK=kept_GK, residuals=residuals, is_compensated=True)
    config = replace(PLAIN, rope_pairs=2)
    latent = compress(split, case.layer, config=config, rank=case.rank(config), statistics=None)
    turns_GP = torch.zeros_like(order_GP, dtype=torch.bool).scatter_(1, kept_GK, True)
    expected = case.original(turns_GP=turns_GP, factor_HP=residuals.factor_HP)
    assert_equal(assemble(split, latent, case.layer), case.x_TD, expected)


@pytest.mark.parametrize("kept", [0, 1])
def test_no_pair_or_one(kept):
    case = Case("gqa")
    config = replace(PLAIN, rope_strategy="high", rope_pairs=kept)
    turns_GP = (torch.arange(case.pairs.count) < kept).expand(2, -1)
    assert_equal(case.convert(config), case.x_TD, case.original(turns_GP=turns_GP))


@pytest.mark.parametrize("method", ["paper-joint", "transmla", "best"])
@pytest.mark.parametrize("name", ["mqa", "biased mqa"])
def test_a_shared_key_of_one_kv_head_is_exact(name, method):
    case = Case(name)
    config = preset(method, mla_layout="deepseek", rope_stride=1, rope_pairs=case.pairs.count)
    tolerance = {"rtol": 0, "atol": 1e-6} if method == "best" else EXACT
    # nothing is left for plain keys, so the latent holds values only
    layer = case.convert(config, rank=case.shape.head_size)
    assert cache_of(layer).total == 2 * case.shape.head_size
    assert_equal(layer, case.x_TD, case.original(), **tolerance)


@pytest.mark.parametrize("name", ["mha", "gqa", "biased", "llama3"])
def test_rotation_across_heads_changes_nothing(name):
    """E10: every pair's keys turned by a random unitary matrix across KV heads, all kept."""
    case = Case(name)
    groups, count = case.shape.num_groups, case.pairs.count
    draw = torch.Generator().manual_seed(5)
    read_KGP = torch.zeros(groups * count, groups, count, dtype=torch.complex128)
    for pair in range(count):
        real, imaginary = torch.randn(2, groups, groups, generator=draw, dtype=torch.float64)
        unitary, _ = torch.linalg.qr(torch.complex(real, imaginary))
        read_KGP[pair * groups : (pair + 1) * groups, :, pair] = unitary.T
    shared = SharedKey(
        read_KGP=read_KGP,
        write_KGP=read_KGP,
        pairs_K=torch.arange(count).repeat_interleave(groups),
    )
    split = split_shared(case.layer, shared=shared)
    turned = split.key_plain_GND[:, torch.cat((case.pairs.first_P, case.pairs.second_P))]
    assert turned.abs().max() < 1e-12
    latent = compress(split, case.layer, config=PLAIN, rank=case.full_rank, statistics=None)
    assert_equal(assemble(split, latent, case.layer), case.x_TD, case.original())


@pytest.mark.parametrize("strategy", ["residual", "2-norm"])
@pytest.mark.parametrize("stride", [1, 2])
def test_directions_of_pairs_that_do_not_turn_are_exact(strategy, stride):
    """What a slot does not carry is plain, so only rotation can be lost."""
    case = Case("biased")
    standing = replace(case.layer.pairs, frequencies_P=torch.zeros(case.pairs.count))
    statistics = case.statistics()
    case.layer = replace(case.layer, pairs=standing)
    config = replace(
        PLAIN, mla_layout="deepseek", rope_strategy=strategy, rope_pairs=2, rope_stride=stride
    )
    layer = case.convert(config, statistics=statistics)
    none_turn = torch.zeros(case.shape.num_groups, case.pairs.count, dtype=torch.bool)
    assert_equal(layer, case.x_TD, case.original(turns_GP=none_turn))


@pytest.mark.parametrize("name", ["gqa", "biased"])
def test_one_direction_a_pair_is_a_shared_key_written_out(name):
    """E2 of the layout `deepseek`: logits from original keys, directions and factors, by loops."""
    case = Case(name)
    statistics = case.statistics()
    residuals = LogitResiduals.of(statistics.gram_HPFF)
    shared = residual_directions(
        case.layer, statistics, residuals, num_slots=3, stride=2, is_compensated=True
    )
    products = torch.einsum("kgp,kgp->k", shared.read_KGP.conj(), shared.write_KGP)
    torch.testing.assert_close(products, torch.ones_like(products))
    split = split_shared(case.layer, shared=shared, residuals=residuals, is_compensated=True)
    latent = compress(split, case.layer, config=PLAIN, rank=case.full_rank, statistics=None)
    got = assemble(split, latent, case.layer)
    expected = _shared_key_logits(case, shared, residuals.factor_HP)
    found = latent_heads(got, case.x_TD)
    for head in range(case.shape.num_heads):
        group = head // case.layer.heads_per_group
        logits_TT = found.query_rotary_HTC[head] @ found.key_rotary_BTC[0].T
        logits_TT = logits_TT + found.query_plain_HTN[head] @ found.key_plain_GTN[group].T
        logits_TT = logits_TT * got.softmax_scale
        # up to what is the same for all keys of a query, which the softmax ignores
        difference_TT = logits_TT - expected[head]
        difference_TT = difference_TT - difference_TT[:, :1]
        assert difference_TT.abs().max() < 1e-9


def _shared_key_logits(case: Case, shared: SharedKey, factor_HP: Tensor) -> list[Tensor]:
    """[T, T] of every head, causal or not."""
    tokens, width = len(case.x_TD), case.shape.head_size
    q, k = (case.x_TD @ case.tensors[f"{n}_proj.weight"].T for n in "qk")
    q = (q + case.tensors.get("q_proj.bias", 0.0)).view(tokens, -1, width)
    k = (k + case.tensors.get("k_proj.bias", 0.0)).view(tokens, -1, width)
    count = case.pairs.count
    t = torch.arange(tokens, dtype=torch.float64)
    q_THP = torch.complex(q[..., :count], q[..., count:])
    k_TGP = torch.complex(k[..., :count], k[..., count:])
    slots_TK = torch.einsum("kgp,tgp->tk", shared.read_KGP.conj(), k_TGP)
    logits = []
    for head in range(case.shape.num_heads):
        group = head // case.layer.heads_per_group
        plain_TP, logits_TT = k_TGP[:, group].clone(), torch.zeros(tokens, tokens).double()
        for slot, pair in enumerate(shared.pairs_K.tolist()):
            carried_TP = slots_TK[:, slot, None] * shared.write_KGP[slot, group]
            plain_TP -= carried_TP
            turn_TT = torch.exp(1j * (t - t[:, None]) * case.pairs.frequencies_P[pair])
            logits_TT += (q_THP[:, head].conj() @ carried_TP.T * turn_TT).real
        logits_TT += (factor_HP[head] * q_THP[:, head].conj() @ plain_TP.T).real
        logits.append(logits_TT * width**-0.5)
    return logits


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gqa", "paper"),
        ("biased", "paper"),
        ("normed", "paper"),
        ("gqa", "deepseek"),
        ("biased", "deepseek"),
    ],
)
def test_absorbed_is_not_absorbed(name, layout):
    case = Case(name)
    config = replace(PLAIN, mla_layout=layout, rope_stride=1, rope_pairs=2)
    layer = case.convert(config, rank=15)
    expected = latent_attention(layer, case.x_TD)
    torch.testing.assert_close(latent_attention(layer, case.x_TD, is_absorbed=True), expected)
    found = latent_heads(layer, case.x_TD)
    outputs_TO = torch.cat(list(latent_head_outputs(layer, found)), dim=-1)
    own = outputs_TO @ layer.output_DHV.flatten(1).T
    own = own if layer.output_bias_D is None else own + layer.output_bias_D
    torch.testing.assert_close(own, expected)


def test_biases_of_plain_keys_do_not_matter_and_those_of_values_are_the_outputs():
    """E9: the bias of dropped key widths is gone, that of values is in the output's bias."""
    case = Case("biased")
    layer = case.convert(replace(PLAIN, rope_strategy="high", rope_pairs=2))
    output, value = case.tensors["o_proj.weight"], case.tensors["v_proj.bias"]
    per_head = value.view(2, -1).repeat_interleave(2, 0).flatten()
    torch.testing.assert_close(layer.output_bias_D, output @ per_head + case.tensors["o_proj.bias"])
    turns_GP = (torch.arange(case.pairs.count) < 2).expand(2, -1)
    expected = case.original(turns_GP=turns_GP)
    assert_equal(layer, case.x_TD, expected)
    key_bias = case.tensors["k_proj.bias"].view(2, -1)
    key_bias[:, 2 : case.pairs.count] = 100.0  # of pairs that stand still
    torch.testing.assert_close(case.original(turns_GP=turns_GP), expected, **EXACT)


def test_a_query_latent_at_full_rank_is_exact():
    case = Case("biased")
    config = replace(PLAIN, rope_pairs=case.pairs.count, q_rank=case.shape.hidden_size)
    layer = case.convert(config)
    assert layer.query_down_ED is not None
    assert_equal(layer, case.x_TD, case.original())
    with pytest.raises(ValueError, match="--q-rank 41 is above"):
        case.convert(replace(config, q_rank=41))


def test_weights_of_less_precision_are_factorised_in_float64():
    case = Case("gqa")
    config = preset("best", rope_pairs=2)
    rounded = {name: tensor.bfloat16() for name, tensor in case.tensors.items()}
    found = []
    for dtype in (torch.float64, torch.float32):
        layer, x_TD = AttentionLayer.of(rounded, case.shape, dtype=dtype), case.x_TD.to(dtype)
        statistics = sequence_statistics(layer, x_TD, keep=True)
        converted, _ = convert_layer(layer, config=config, rank=20, statistics=statistics)
        assert {t.dtype for n, t in vars(converted).items() if n in WEIGHTS} == {dtype}
        found.append(latent_attention(converted, x_TD).double())
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-3)
    assert converted.to(torch.bfloat16).down_RD.dtype == torch.bfloat16
    assert converted.to(torch.bfloat16).frequencies_BK.dtype == torch.float32


@pytest.mark.parametrize("layout", ["paper", "deepseek"])
def test_neighbours_or_halves_make_the_same_conversion(layout):
    """E3: the order of a head's widths decides nothing, neither which pairs stay nor the result."""
    halves, neighbours = Case("biased"), Case("biased", rope=Rope(theta=100.0, is_interleaved=True))
    order = torch.arange(12).view(2, 6).T.flatten()  # width of the halves at each interleaved place
    for name in ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias"):
        by_head = halves.tensors[name].unflatten(0, (-1, 12))
        neighbours.tensors[name] = by_head[:, order].flatten(0, 1)
    neighbours.layer = AttentionLayer.of(neighbours.tensors, neighbours.shape, dtype=torch.float64)
    config = preset("best", mla_layout=layout, rope_stride=1, rope_pairs=2)
    found = [
        convert_layer(c.layer, config=config, rank=12, statistics=c.statistics())
        for c in (halves, neighbours)
    ]
    assert torch.equal(found[0][1].pairs_BK, found[1][1].pairs_BK)
    first, second = (latent_attention(layer, halves.x_TD) for layer, _ in found)
    torch.testing.assert_close(first, second, rtol=0, atol=1e-5)


def test_the_same_twice_is_the_same_bits():
    found = [Case("biased").convert(preset("best", rope_pairs=2), rank=15) for _ in range(2)]
    for name, value in vars(found[0]).items():
        if isinstance(value, Tensor):
            assert torch.equal(value, getattr(found[1], name)), name


WEIGHTS = {"query_rotary_HCE", "query_plain_HNE", "down_RD", "key_up_GNR", "output_DHV"}
