"""Converted attention as a Megatron module: exact at full rank, and the same on every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_ext.mla.presets import preset
from megatron_ext.upstream.mla_parts import LatentShape
from tests.ranks import RankPool
from tests.upstream.jobs import LLAMA, read_tensors
from tests.upstream.mla_jobs import logits_pairs, save_random, step_gradients
from tests.weights.tiny_models import MODELS, Tiny, save, tokens

pytestmark = pytest.mark.slow
MQA = Tiny(family="llama", config={"head_dim": 12, "num_key_value_heads": 1})
FAMILIES = ("llama", "llama tied biased", "llama 3.2", "qwen2 yarn", "qwen3", "mixtral")
PAIRS = {"llama": 6, "llama tied biased": 4, "llama 3.2": 12, "qwen2 yarn": 4, "qwen3": 6}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny checkpoints of every family that can be converted."""
    root = tmp_path_factory.mktemp("mla")
    found = {name: root / name for name in FAMILIES}
    for name, folder in found.items():
        save(MODELS[name], folder)
    return found


def is_close(logits: Tensor, expected: Tensor) -> bool:
    """Within rounding of float32."""
    error = float((logits - expected).abs().max())
    return error < 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize(
    "flags",
    ["--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2"],
)
def test_all_pairs_and_full_rank_are_the_original(
    ranks: RankPool, folders: dict[str, Path], flags: str
) -> None:
    """E1 of the acceptance list, on tensor-parallel and pipeline ranks too."""
    configs = {
        name: preset(
            "paper-joint",
            rope_strategy="high",
            rope_pairs=PAIRS.get(name, 6),
            rope_compensation=False,
        )
        for name in FAMILIES
    }
    for found in ranks(2).run(logits_pairs, folders, flags, tokens(), configs):
        for name, (expected, logits) in found.items():
            assert expected is None or is_close(logits, expected), name


def test_one_kv_head_with_a_slot_for_every_pair_is_the_original(
    ranks: RankPool, tmp_path: Path
) -> None:
    """E1 in layout `deepseek`, which is exact with one KV head."""
    save(MQA, tmp_path / "mqa")
    config = preset("paper-joint", mla_layout="deepseek", rope_pairs=6, rope_stride=1)
    found = ranks(1).run(logits_pairs, {"mqa": tmp_path / "mqa"}, "", tokens(), {"mqa": config})
    expected, logits = found[0]["mqa"]
    assert is_close(logits, expected)


LATENTS = {
    "paper": LatentShape(layout="paper", num_pairs=2, rank=10, has_norms=True),
    "deepseek": LatentShape(
        layout="deepseek",
        num_pairs=3,
        rank=10,
        query_rank=12,
        has_query_bias=True,
        has_key_rotary_bias=True,
        has_output_bias=True,
    ),
}
LAYOUTS = {
    "tp2 sp selective packed": (
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --recompute-activations --packing",
    ),
    "pp2 vpp2": (
        2,
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    ),
    "tp2 pp2 sp full": (
        4,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
}


@pytest.mark.parametrize("kind", LATENTS)
def test_loss_and_gradients_are_the_same_on_every_layout(
    ranks: RankPool, tmp_path: Path, kind: str
) -> None:
    """E13: the checkpoint is made on one rank and loaded on all layouts, frequencies included."""
    latent, initial = LATENTS[kind], tmp_path / "initial"
    ranks(1).run(save_random, LLAMA, latent, initial)
    [(loss, frequencies)] = ranks(1).run(step_gradients, LLAMA, latent, initial, tmp_path / "one")
    assert len(frequencies) == 4 and frequencies[0].std() > 0.1
    names = []
    for name, (size, flags) in LAYOUTS.items():
        words = [*LLAMA, *flags.split()]
        found = ranks(size).run(step_gradients, words, latent, initial, tmp_path / name)
        names.append(name)
        for other, _ in found:
            assert other == pytest.approx(loss, rel=1e-6), name
    [worst] = ranks(1).run(differences, tmp_path, names)
    assert max(worst.values()) < 1e-5, worst


def differences(folder: Path, names: list[str]) -> dict[str, float]:
    """Largest difference of gradients, relative to each tensor's largest."""
    one, found = read_tensors(folder / "one"), {}
    for name in names:
        other = read_tensors(folder / name)
        assert other.keys() == one.keys()
        found[name] = max(
            float((other[key].double() - one[key].double()).abs().max() / one[key].abs().max())
            for key in one
            if one[key].dtype.is_floating_point
        )
    return found


def test_16_bit_models_keep_their_frequencies(ranks: RankPool, tmp_path: Path) -> None:
    latent = LATENTS["paper"]
    ranks(1).run(save_random, LLAMA, latent, tmp_path / "initial")
    found = [
        ranks(1).run(step_gradients, [*LLAMA, *more], latent, tmp_path / "initial", tmp_path / "x")
        for more in ([], ["--bf16"])
    ]
    [(_, exact)], [(loss, half)] = found
    assert loss > 0
    for a, b in zip(exact, half, strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b)


def test_kv_heads_that_ranks_do_not_divide_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    flags = [*LLAMA, "--tensor-model-parallel-size", "4"]
    for said in ranks(4).run(refusal, flags, LATENTS["paper"], tmp_path):
        assert "--tensor-model-parallel-size 4 does not divide the 2 KV heads" in said


def refusal(flags: list[str], latent: LatentShape, folder: Path) -> str:
    """What a layout that does not fit says."""
    with pytest.raises(ValueError) as raised:
        save_random(flags, latent, folder)
    return str(raised.value)
