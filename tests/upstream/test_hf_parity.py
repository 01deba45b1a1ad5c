"""Every family on every layout has the logits of transformers, and comes out as it went in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.marks import slow_except
from tests.ranks import RankPool
from tests.upstream.hf_jobs import (
    embedding_and_output,
    export_torch_dist,
    save_torch_dist,
    visit,
)
from tests.weights.tiny_models import BASE, MODELS, WITH_EXPERTS, save, tokens

TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
EP2 = "--expert-model-parallel-size 2"
ONE_OF_EACH = list({tiny.family: name for name, tiny in MODELS.items()}.values())
FAMILIES = ["llama tied biased", "llama 3.2", *ONE_OF_EACH]
LAYOUTS = {
    "one rank": (1, "", list(MODELS)),
    "tp2": (2, TP2, FAMILIES),
    "pp2": (2, PP2, FAMILIES),
    "pp2 vpp2": (2, f"{PP2} --num-virtual-stages-per-pipeline-rank 2", FAMILIES),
    "ep2": (2, EP2, WITH_EXPERTS),
    "tp2 ep2 sp": (
        2,
        f"{TP2} {EP2} --expert-tensor-parallel-size 1 --sequence-parallel",
        WITH_EXPERTS,
    ),
}
LOGITS = 5e-6  # fp32, logits of up to 3: the sums run in another order
VOCAB_SIZE = BASE["vocab_size"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Tensor]]:
    """The folder of every model, and the logits transformers computes."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: (root / name, save(tiny, root / name)) for name, tiny in MODELS.items()}


@pytest.mark.parametrize(
    "layout",
    slow_except({"tp2", "ep2"}, LAYOUTS),
)
def test_logits_are_transformers_and_export_is_the_file(
    ranks: RankPool, checkpoints: dict[str, tuple[Path, Tensor]], layout: str
):
    size, flags, names = LAYOUTS[layout]
    folders = {name: checkpoints[name][0] for name in names}
    results = ranks(size).run(visit, folders, flags, tokens(), timeout=110)
    errors = {}
    for name in names:
        found = [rank[name][0] for rank in results if rank[name][0] is not None]
        expected = checkpoints[name][1]
        errors[name] = max(float((f[..., :VOCAB_SIZE] - expected).abs().max()) for f in found)
    assert max(errors.values()) < LOGITS, errors
    assert [name for name in names if not results[0][name][1]] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen2"])
def test_bfloat16_goes_in_and_out_bit_for_bit(ranks: RankPool, tmp_path: Path, name: str):
    """Routers' choice biases stay in float32, as in the file."""
    expected = save(MODELS[name], tmp_path, dtype=torch.bfloat16)
    results = ranks(2).run(visit, {name: tmp_path}, f"{PP2} --bf16", tokens())
    assert results[0][name][1]
    errors = (results[1][name][0][..., :VOCAB_SIZE].float() - expected).abs()
    assert errors.median() < 0.02  # the median, as rounding sends some tokens to other experts


def test_bfloat16_files_fill_float32_models_exactly(ranks: RankPool, tmp_path: Path):
    expected = save(MODELS["deepseek_v3"], tmp_path, dtype=torch.bfloat16)
    (result,) = ranks(1).run(visit, {"it": tmp_path}, "", tokens())
    assert (result["it"][0][..., :VOCAB_SIZE] - expected).abs().max() < LOGITS


@pytest.mark.parametrize(
    ("name", "write", "read"),
    [("llama tied biased", TP2, PP2), ("deepseek_v3", PP2, f"{TP2} {EP2} --sequence-parallel")],
)
def test_through_torch_dist_and_another_layout(
    ranks: RankPool,
    checkpoints: dict[str, tuple[Path, Tensor]],
    tmp_path: Path,
    name: str,
    write: str,
    read: str,
):
    folder = checkpoints[name][0]
    ranks(2).run(save_torch_dist, folder, write, tmp_path / "saved")
    etp = " --expert-tensor-parallel-size 1" if EP2 in read else ""
    assert all(ranks(2).run(export_torch_dist, folder, read + etp, tmp_path / "saved"))


def test_vocabulary_padding_is_zero_and_the_tied_copy_equal(
    ranks: RankPool, checkpoints: dict[str, tuple[Path, Tensor]]
):
    flags = f"{TP2} {PP2}"
    results = ranks(4).run(embedding_and_output, checkpoints["llama tied biased"][0], flags)
    embedding = torch.cat([results[0][0], results[1][0]])
    output = torch.cat([results[2][1], results[3][1]])
    assert embedding.shape[0] == 128
    assert embedding[VOCAB_SIZE:].count_nonzero() == 0
    assert embedding[:VOCAB_SIZE].count_nonzero() == VOCAB_SIZE * BASE["hidden_size"]
    assert torch.equal(embedding, output)
