"""Calibration sees what transformers sees, and its sums are the same on every layout."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields
from functools import reduce
from operator import add
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_ext.mla.config import MLAConfig
from megatron_ext.mla.convert import convert_layer
from megatron_ext.mla.layers import AttentionLayer
from megatron_ext.mla.presets import preset
from megatron_ext.mla.statistics import LayerStatistics, sequence_statistics
from megatron_ext.upstream.mla_calibrate import calibration_sequences
from megatron_ext.weights.checks import open_checkpoint
from tests.marks import slow_except
from tests.ranks import RankPool
from tests.upstream.mla_calibrate_jobs import Statistics, broken, calibrated
from tests.weights.tiny_models import BASE, MODELS, build, save

FAMILIES = ("llama tied biased", "qwen2 yarn", "qwen3")
LENGTH = 19  # not a multiple of 2: sequence parallelism pads
CONFIG = MLAConfig(
    calibration_context=LENGTH, calibration_tokens=100, calibration_kept=3, calibration_queries=8
)
TENSOR = "--tensor-model-parallel-size 2"
PIPELINE = "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "one rank": (1, "", 5),
    "tp2 sp": (2, f"{TENSOR} --sequence-parallel", 5),
    "tp2 pp2": (4, f"{TENSOR} {PIPELINE}", 5),
    "pp2 vpp2": (2, f"{PIPELINE} --num-virtual-stages-per-pipeline-rank 2", 5),
    "dp2": (2, "", 5),
    "more dp ranks than sequences": (4, "--global-batch-size 4", 3),
}
"""Ranks, flags, sequences."""


def sequences() -> list[Tensor]:
    """Five of a text of 110 tokens."""
    draw = torch.Generator().manual_seed(3)
    text = torch.randint(0, BASE["vocab_size"], (110,), generator=draw)
    return calibration_sequences({"text": text}, CONFIG)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints with biases, with scaled rotation and with normalised queries."""
    root = tmp_path_factory.mktemp("calibrate")
    found = {name: root / name for name in FAMILIES}
    for name, folder in found.items():
        save(MODELS[name], folder)
    return found


def original_layer(folder: Path, index: int, *, dtype: torch.dtype) -> AttentionLayer:
    prefix = f"model.layers.{index}.self_attn."
    tensors = load_file(folder / "model.safetensors")
    own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    return AttentionLayer.of(own, open_checkpoint(folder).architecture, dtype=dtype)


@torch.no_grad()
def expected_statistics(name: str, folder: Path, texts: list[Tensor]) -> Statistics:
    """Of all heads at once, on the inputs that transformers' attention gets."""
    model, inputs = build(MODELS[name]), defaultdict(list)
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_pre_hook(
            lambda _module, _args, given, index=index: inputs[index].append(
                given["hidden_states"][0]
            ),
            with_kwargs=True,
        )
    for tokens_T in texts:
        model(tokens_T[None])
    found = {}
    for index, seen in inputs.items():
        layer = original_layer(folder, index, dtype=torch.float32)
        parts = [
            sequence_statistics(layer, x_TD, num_queries=8, keep=number < 3)
            for number, x_TD in enumerate(seen)
        ]
        found[index] = reduce(add, parts)
    return found


def largest_difference(found: LayerStatistics, expected: LayerStatistics) -> float:
    """Of all sums, relative to the largest number in each."""
    differences = []
    for field in fields(LayerStatistics):
        got, wanted = getattr(found, field.name), getattr(expected, field.name)
        assert got.shape == wanted.shape and got.dtype == wanted.dtype, field.name
        differences.append(float((got - wanted).abs().max() / wanted.abs().max()))
    return max(differences)


@pytest.mark.parametrize("layout", slow_except({"one rank"}, LAYOUTS))
def test_statistics_are_those_of_transformers_inputs(
    ranks: RankPool, folders: dict[str, Path], layout: str
):
    size, flags, count = LAYOUTS[layout]
    texts = sequences()[:count]
    writer, *others = ranks(size).run(calibrated, folders, flags, texts, CONFIG)
    assert all(not statistics for other in others for statistics in other.values())
    for name, folder in folders.items():
        expected = expected_statistics(name, folder, texts)
        assert list(writer[name]) == list(expected) == [0, 1, 2, 3]
        for index, wanted in expected.items():
            assert wanted.inputs_STD.shape[:2] == (3, LENGTH) and wanted.tokens == count * LENGTH
            assert largest_difference(writer[name][index], wanted) < 1e-5, (name, index)


@pytest.mark.slow
def test_conversions_with_statistics_of_two_layouts_are_the_same(
    ranks: RankPool, folders: dict[str, Path]
):
    """E13: products of the factors, which themselves may turn and change sign."""
    name, config = "llama tied biased", preset("best", rope_pairs=2)
    only, found = {name: folders[name]}, []
    for size, flags, _ in (LAYOUTS["one rank"], LAYOUTS["tp2 sp"]):
        statistics = ranks(size).run(calibrated, only, flags, sequences(), CONFIG)[0][name]
        for index in statistics:
            layer = original_layer(folders[name], index, dtype=torch.float64)
            latent, _ = convert_layer(layer, config=config, rank=8, statistics=statistics[index])
            found += [latent.key_up_GNR @ latent.down_RD, latent.value_up_GVR @ latent.down_RD]
    half = len(found) // 2
    for one, other in zip(found[:half], found[half:], strict=True):
        assert float((one - other).abs().max() / one.abs().max()) < 1e-3


@pytest.mark.slow
def test_layers_that_break_or_cannot_be_watched_are_refused(
    ranks: RankPool, folders: dict[str, Path]
):
    results = ranks(2).run(broken, folders["qwen3"], PIPELINE, sequences(), CONFIG, layer=2)
    assert [num_layers for num_layers, _ in results] == [4, 0]
    for _, (infinite, fused) in results:
        assert infinite.startswith("layer 2: its attention sees or computes infinities")
        assert "--transformer-impl transformer_engine normalises inside" in fused


def test_texts_are_cut_into_whole_sequences():
    texts = sequences()
    assert [len(tokens_T) for tokens_T in texts] == [LENGTH] * 5
    short = calibration_sequences({"short": torch.arange(2 * LENGTH + 1)}, CONFIG)
    assert torch.equal(torch.cat(short), torch.arange(2 * LENGTH))


def test_texts_take_turns_until_they_end():
    """100 tokens are five sequences, whatever there is of each text."""
    texts = {name: torch.full((n * LENGTH,), n) for name, n in (("a", 2), ("b", 1), ("c", 4))}
    found = calibration_sequences(texts, CONFIG)
    assert [int(tokens_T[0]) for tokens_T in found] == [2, 1, 4, 2, 4]


@pytest.mark.parametrize(
    ("tokens", "config", "message"),
    [
        (
            LENGTH - 1,
            CONFIG,
            "some.txt has 18 tokens, less than one sequence of --calibration-context 19",
        ),
        (3000, MLAConfig(calibration_tokens=1000), "--calibration-tokens 1000 is less than one"),
    ],
)
def test_too_little_text_is_refused(tokens: int, config: MLAConfig, message: str):
    with pytest.raises(ValueError, match=message):
        calibration_sequences({"some.txt": torch.arange(tokens)}, config)
