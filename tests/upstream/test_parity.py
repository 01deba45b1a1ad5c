"""Every layout computes the single process's loss, gradients and parameters after 3 updates."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from tests.marks import slow_except
from tests.ranks import RankPool
from tests.upstream.jobs import DEEP, LLAMA, MOE, read_tensors, save_initial_weights, train_from

TP2 = "--tensor-model-parallel-size 2"
SP = f"{TP2} --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
PP4 = "--pipeline-model-parallel-size 4"
VPP2 = "--num-virtual-stages-per-pipeline-rank 2"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SCATTER = "--scatter-gather-pipeline-tensors"
DISTRIBUTED = "--use-distributed-optimizer"
OVERLAP = f"{DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather"

MODELS = {"llama": LLAMA, "deep": DEEP, "moe": MOE}
LAYOUTS = {
    "dp2": (2, ""),
    "dp4": (4, ""),
    "dp2 distributed optimizer": (2, DISTRIBUTED),
    "dp4 overlap": (4, OVERLAP),
    "tp2": (2, TP2),
    "tp2 sp": (2, SP),
    "tp2 sp selective": (2, f"{SP} --recompute-activations"),
    "tp2 sp layernorm": (
        2,
        f"{SP} --recompute-granularity selective --recompute-modules core_attn layernorm mlp",
    ),
    "tp2 sp full": (2, f"{SP} {FULL}"),
    "pp2": (2, PP2),
    "pp4": (4, PP4),
    "pp2 vpp2": (2, f"{PP2} {VPP2}"),
    "pp4 vpp2": (4, f"{PP4} {VPP2}"),
    "tp2 pp2 vpp2 sp": (4, f"{SP} {PP2} {VPP2}"),
    "tp2 pp2": (4, f"{TP2} {PP2}"),
    "tp2 pp2 scatter": (4, f"{TP2} {PP2} {SCATTER}"),
    "tp2 pp2 vpp2": (4, f"{TP2} {PP2} {VPP2}"),
    "tp2 pp2 vpp2 scatter": (4, f"{TP2} {PP2} {VPP2} {SCATTER}"),
    "dp2 tp2 pp2 distributed optimizer": (8, f"{TP2} {PP2} {DISTRIBUTED}"),
}
MOE_LAYOUTS = {
    "ep2": (2, "--expert-model-parallel-size 2"),
    "ep2 pp2 distributed optimizer": (4, f"--expert-model-parallel-size 2 {PP2} {DISTRIBUTED}"),
    "ep2 tp2 sp etp1": (4, f"--expert-model-parallel-size 2 {SP} --expert-tensor-parallel-size 1"),
    "tp2 sp": (2, SP),
}
QUICK = {"dp2 distributed optimizer", "tp2 pp2 vpp2 sp", "ep2"}
LOSS = 1e-6
GRADIENT = 1e-5  # fp32: sums of a few hundred terms in another order, relative to the largest entry
PARAMETER = 1e-5  # with --adam-eps 1e-5: Adam must not blow up gradients that are rounding errors


@pytest.fixture(scope="module")
def reference(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory):
    """Of a model: the weights all layouts start from, and what one process makes of them."""

    @cache
    def of(model: str) -> tuple[Path, dict]:
        folder = tmp_path_factory.mktemp(model)
        ranks(1).run(save_initial_weights, MODELS[model], folder / "initial")
        [result] = ranks(1).run(train_from, MODELS[model], folder / "initial", folder)
        return folder, result

    return of


def compare_folders(out: Path, reference: Path) -> dict[str, float]:
    """Largest relative difference of gradients and weights; runs on one rank."""
    worst = {}
    for kind in ("gradients", "weights"):
        mine, theirs = read_tensors(out / kind), read_tensors(reference / kind)
        assert mine.keys() == theirs.keys()
        worst[kind] = max(
            float((mine[key] - theirs[key]).abs().max() / theirs[key].abs().max()) for key in theirs
        )
    return worst


def check(ranks: RankPool, reference, tmp_path: Path, *, model: str, size: int, flags: str) -> dict:
    """Run a layout and hold its results against the single process's."""
    base = MODELS[model]
    folder, expected = reference(model)
    results = ranks(size).run(train_from, [*base, *flags.split()], folder / "initial", tmp_path)
    for result in results:
        torch.testing.assert_close(result["losses"][0], expected["losses"][0], rtol=0, atol=LOSS)
        torch.testing.assert_close(result["losses"], expected["losses"], rtol=0, atol=1e-5)
        torch.testing.assert_close(result["norms"], expected["norms"], rtol=1e-5, atol=0)
    [worst] = ranks(1).run(compare_folders, tmp_path, folder)
    assert worst["gradients"] < GRADIENT, worst
    assert worst["weights"] < PARAMETER, worst
    return results


@pytest.mark.parametrize("name", slow_except(QUICK, LAYOUTS))
def test_dense_layout_equals_single_process(
    ranks: RankPool, reference, tmp_path, name: str
) -> None:
    size, flags = LAYOUTS[name]
    model = "deep" if name == "pp4 vpp2" else "llama"  # two layers for each of the 4 stages
    check(ranks, reference, tmp_path, model=model, size=size, flags=flags)


@pytest.mark.parametrize("name", slow_except(QUICK, MOE_LAYOUTS))
def test_moe_layout_equals_single_process(ranks: RankPool, reference, tmp_path, name: str) -> None:
    size, flags = MOE_LAYOUTS[name]
    check(ranks, reference, tmp_path, model="moe", size=size, flags=flags)
