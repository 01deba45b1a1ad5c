"""Calibration sums add over texts and join over ranks, and their file gives them back."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_ext.mla.forward import head_logits, heads
from megatron_ext.mla.layers import AttentionLayer
from megatron_ext.mla.statistics import LayerStatistics, sampled_queries, sequence_statistics
from megatron_ext.mla.statistics_file import (
    StatisticsFile,
    fingerprint,
    overlap,
    save_statistics,
)
from tests.mla.cases import Case
from tests.mla.reference import random_inputs


def assert_same(got: LayerStatistics, expected: LayerStatistics, *, rtol: float = 1e-10) -> None:
    for field in fields(LayerStatistics):
        left, right = getattr(got, field.name), getattr(expected, field.name)
        torch.testing.assert_close(left, right, rtol=rtol, atol=1e-12, msg=field.name)


def test_sums_of_parts_are_those_of_the_whole():
    case = Case("biased")
    texts = [random_inputs(case.shape, seed=seed) for seed in (1, 2)]
    first, second = (sequence_statistics(case.layer, x_TD, keep=True) for x_TD in texts)
    whole = first + second
    x_TD = torch.cat(texts)
    assert int(whole.tokens) == len(x_TD)
    torch.testing.assert_close(whole.moment(), x_TD.T @ x_TD / len(x_TD))
    torch.testing.assert_close(whole.mean_D, x_TD.mean(0))
    assert torch.equal(whole.inputs_STD, torch.stack(texts))
    kept_once = first + sequence_statistics(case.layer, texts[1][:5])
    assert kept_once.inputs_STD.shape == (1, *texts[0].shape)


def test_token_weights_are_what_tokens_receive():
    case = Case("gqa")
    statistics = case.statistics()
    found = heads(case.layer, case.x_TD)
    received_T = sum(a.softmax(-1).square().sum(0) for a in head_logits(case.layer, found))
    weight_T = 0.2 + 0.8 * received_T / received_T.mean()
    expected = (case.x_TD * weight_T[:, None]).T @ case.x_TD / len(case.x_TD)
    torch.testing.assert_close(statistics.moment(token_weight=0.8), expected)


@pytest.mark.parametrize("name", ["gqa", "biased", "normed"])
def test_ranks_with_some_heads_join_to_all_heads(name):
    case = Case(name)
    layer, per_group = case.layer, case.layer.heads_per_group

    def of_group(group: int) -> AttentionLayer:
        heads = slice(group * per_group, (group + 1) * per_group)
        own = {"query_HWD": heads, "query_bias_HW": heads, "key_GWD": slice(group, group + 1)}
        own |= {n: slice(group, group + 1) for n in ("key_bias_GW", "value_GVD", "value_bias_GV")}
        parts = {n: getattr(layer, n) for n in own}
        parts = {n: None if value is None else value[own[n]] for n, value in parts.items()}
        return replace(layer, output_DHV=layer.output_DHV[:, heads], **parts)

    first, second = (sequence_statistics(of_group(g), case.x_TD, keep=True) for g in (0, 1))
    assert_same(first.join(second), case.statistics())


@pytest.mark.parametrize("name", ["gqa", "half rotary, interleaved"])
def test_norms_are_lengths_of_pairs(name):
    case = Case(name)
    found, statistics = heads(case.layer, case.x_TD), case.statistics()
    for x_HTW, sums_HP in (
        (found.query_HTW, statistics.query_norms_HP),
        (found.key_GTW, statistics.key_norms_GP),
    ):
        for pair in range(case.pairs.count):
            widths = [int(case.pairs.first_P[pair]), int(case.pairs.second_P[pair])]
            expected_H = x_HTW[..., widths].norm(dim=-1).sum(1)
            torch.testing.assert_close(sums_HP[:, pair], expected_H)


def test_few_queries_stand_for_all():
    assert sampled_queries(10, 0).tolist() == sampled_queries(10, 10).tolist() == list(range(10))
    assert sampled_queries(10, 4).tolist() == [9, 7, 4, 2]
    case = Case("gqa")
    x_TD = random_inputs(case.shape, tokens=120)
    whole, few = (sequence_statistics(case.layer, x_TD, num_queries=n) for n in (0, 40))
    wanted, got = (x.gram_HPFF.diagonal(dim1=-2, dim2=-1).sum((0, 1)) for x in (whole, few))
    torch.testing.assert_close(got, wanted, rtol=0.2, atol=0)
    assert_same(replace(few, gram_HPFF=whole.gram_HPFF), whole)


def test_float32_activations_are_summed_in_float64():
    case = Case("gqa")
    layer = AttentionLayer.of(case.tensors, case.shape)
    got = sequence_statistics(layer, case.x_TD.float())
    assert got.moment_DD.dtype == torch.float64
    assert got.gram_HPFF.dtype == torch.float64
    torch.testing.assert_close(got.gram_HPFF, case.statistics().gram_HPFF, rtol=1e-3, atol=1e-4)


def test_no_tokens_are_refused():
    case = Case("gqa")
    empty = replace(case.statistics(), tokens=torch.tensor(0))
    with pytest.raises(ValueError, match="statistics of no tokens"):
        empty.moment()


def test_a_file_gives_back_what_was_saved(tmp_path: Path):
    case = Case("gqa")
    layers = {0: case.statistics(), 1: sequence_statistics(case.layer, 2 * case.x_TD, keep=True)}
    path = tmp_path / "statistics.safetensors"
    known = fingerprint([torch.arange(200)])
    save_statistics(path, layers, context_length=14, fingerprint=known)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    opened = StatisticsFile.open(path)
    assert (opened.context_length, opened.num_layers) == (14, 2)
    assert torch.equal(opened.fingerprint(), known)
    for index, expected in layers.items():
        got = opened.layer(index)
        assert_same(got, expected, rtol=1e-6)
        assert torch.equal(got.gram_HPFF, expected.gram_HPFF)
        assert got.moment_DD.dtype == torch.float64


def test_other_files_are_refused(tmp_path: Path):
    path = tmp_path / "other.safetensors"
    with pytest.raises(ValueError, match="cannot be read as calibration statistics"):
        StatisticsFile.open(path)
    path.write_bytes(b"not safetensors")
    with pytest.raises(ValueError, match="cannot be read as calibration statistics"):
        StatisticsFile.open(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="has the format None"):
        StatisticsFile.open(path)


def test_an_interrupted_save_leaves_the_old_file(tmp_path: Path):
    case = Case("gqa")
    path = tmp_path / "statistics.safetensors"
    known = fingerprint([torch.arange(200)])
    save_statistics(path, {0: case.statistics()}, context_length=14, fingerprint=known)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        save_statistics(path, {0: case.statistics()}, context_length=complex(1), fingerprint=known)  # pyright: ignore[reportArgumentType]
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_passages_are_recognised_wherever_sequences_are_cut():
    torch.manual_seed(0)
    text, other = torch.randint(0, 1000, (4096,)), torch.randint(0, 1000, (4096,))
    known = fingerprint(text.split(512))
    assert 100 < len(known) < 500, "a sample, not the text"
    assert overlap(known, fingerprint([text[100:2100]])) > 0.7
    assert overlap(known, fingerprint([other])) == 0.0
    assert overlap(known, fingerprint([torch.cat((text[:2048], other))])) == pytest.approx(
        1 / 3, abs=0.1
    )
    joined = torch.cat((fingerprint([text[:2000]]), fingerprint([text[1000:]]))).unique()
    assert torch.equal(joined, fingerprint([text[:2000], text[1000:]]))
    assert len(fingerprint([text[:10]])) == 0 and overlap(known, fingerprint([])) == 0.0


def test_longer_contexts_and_known_text_are_told(tmp_path: Path):
    torch.manual_seed(0)
    text, other = torch.randint(0, 1000, (2, 4096))
    path = tmp_path / "statistics.safetensors"
    layers = {0: Case("gqa").statistics()}
    save_statistics(path, layers, context_length=512, fingerprint=fingerprint([text]))
    file = StatisticsFile.open(path)
    assert file.warnings(context_length=512, text=[other]) == []
    (warning,) = file.warnings(context_length=2048, text=[other])
    assert "calibrated at 512 tokens, and contexts of 2048" in warning
    (warning,) = file.warnings(context_length=512, text=[text[:1000]])
    assert "100% of the evaluated text" in warning
