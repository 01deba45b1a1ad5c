"""Converted attention as a Megatron module: the same on every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_ext.upstream.mla_parts import LatentShape
from tests.ranks import RankPool
from tests.upstream.jobs import LLAMA, read_tensors
from tests.upstream.mla_jobs import save_random, step_gradients

pytestmark = pytest.mark.slow
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
    "tp4 sp": (4, "--tensor-model-parallel-size 4 --sequence-parallel"),
}
MODELS = {"paper": LLAMA, "deepseek": [*LLAMA, "--num-query-groups", "4"]}
"""Flags of a model with 2 and of one with 4 KV heads."""


@pytest.mark.parametrize("kind", LATENTS)
def test_loss_and_gradients_are_the_same_on_every_layout(
    ranks: RankPool, tmp_path: Path, kind: str
) -> None:
    """E13: the checkpoint is made on one rank and loaded on all layouts, frequencies included."""
    latent, flags, initial = LATENTS[kind], MODELS[kind], tmp_path / "initial"
    ranks(1).run(save_random, flags, latent, initial)
    [(loss, frequencies)] = ranks(1).run(step_gradients, flags, latent, initial, tmp_path / "one")
    assert len(frequencies) == 4 and frequencies[0].std() > 0.1
    names = []
    for name, (size, layout) in LAYOUTS.items():
        if kind == "paper" and "tp4" in name:
            continue  # which has 2 KV heads
        words = [*flags, *layout.split()]
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
