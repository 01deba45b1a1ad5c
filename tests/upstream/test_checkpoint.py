"""A run that was saved and resumed is the run that was not interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_ext.data.order import SampleOrder
from megatron_ext.upstream.checkpoint_folder import folder_of
from tests.marks import slow_except
from tests.ranks import RankPool
from tests.upstream import checkpoint_jobs as jobs
from tests.upstream.checkpoint_jobs import DROPOUT, EXACT, MOE

TP2_SP = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
PP2_VPP2 = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"
DISTRIBUTED = "--use-distributed-optimizer"
OVERLAP = f"{DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather"

SAME_LAYOUT = {
    "single": (1, "--verify-integrity"),
    "dp2 overlap bf16": (2, f"{OVERLAP} --bf16"),
    "tp2 pp2 vpp2 sp distributed": (4, f"{TP2_SP} {PP2_VPP2} {DISTRIBUTED}"),
    "ep2 distributed bf16": (2, f"--expert-model-parallel-size 2 {DISTRIBUTED} --bf16"),
}
OTHER_LAYOUTS = {
    "pp2, then tp2": ((2, PP2), (2, TP2_SP)),
    "tp2 pp2 vpp2 sp distributed": (
        (4, f"{TP2_SP} {PP2_VPP2} {DISTRIBUTED}"),
        (1, DISTRIBUTED),
    ),
    "dp2, then dp4 distributed": ((2, OVERLAP), (4, f"{OVERLAP} --ckpt-fully-parallel-load")),
}
"""Two layouts, one after the other, of a run that began and goes on in parallel on one process."""
LOSS = 1e-6  # fp32: the same sums in another order
QUICK = {"single", "dp2 overlap bf16"}


@pytest.mark.parametrize("name", slow_except(QUICK, SAME_LAYOUT))
def test_resumed_equals_uninterrupted_bit_for_bit(ranks: RankPool, tmp_path: Path, name: str):
    """Dropout and lines of different lengths: the random states of data-parallel ranks differ."""
    size, layout = SAME_LAYOUT[name]
    more = [*DROPOUT, *layout.split(), *(MOE if "ep2" in name else [])]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    ranks(size).run(jobs.train, jobs.flags_of(whole, *more))
    jobs.copy_run(whole, resumed, step=2)
    ranks(size).run(jobs.train, jobs.flags_of(resumed, *more))
    folders = [folder_of(run / "saved", 4) for run in (whole, resumed)]
    assert ranks(1).run(jobs.differences, *folders) == [[]]
    assert jobs.metrics(resumed) == jobs.metrics(whole)
    assert len(jobs.metrics(whole)) == 4


@pytest.fixture(scope="module")
def single(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory):
    """Uninterrupted runs of one process, with the plain and with the distributed optimizer."""
    runs = {}
    for flag in ("", DISTRIBUTED):
        runs[flag] = tmp_path_factory.mktemp("single") / "run"
        ranks(1).run(jobs.train, jobs.flags_of(runs[flag], *EXACT, *flag.split()))
    return runs


@pytest.mark.parametrize("name", slow_except((), OTHER_LAYOUTS))
def test_resumed_on_other_layouts_equals_one_process(
    ranks: RankPool, tmp_path: Path, single: dict[str, Path], name: str
):
    """A state of the optimizer that is 1 % off changes the losses by 6e-5."""
    (size, flags), (next_size, next_flags) = OTHER_LAYOUTS[name]
    whole = single[DISTRIBUTED if "distributed" in name else ""]
    first, second = tmp_path / "first", tmp_path / "second"
    jobs.copy_run(whole, first, step=1)
    ranks(size).run(jobs.train, jobs.flags_of(first, *EXACT, *flags.split()))
    jobs.copy_run(first, second, step=2)
    ranks(next_size).run(jobs.train, jobs.flags_of(second, *EXACT, *next_flags.split()))
    for run in (first, second):
        torch.testing.assert_close(jobs.losses(run), jobs.losses(whole), rtol=0, atol=LOSS)


def test_every_random_stream_is_restored(ranks: RankPool, tmp_path: Path):
    results = ranks(2).run(jobs.random_streams, jobs.flags_of(tmp_path / "run", *TP2_SP.split()))
    for before, after, is_other_device_restored in results:
        assert before == after
        assert len(before) > 4
        assert not is_other_device_restored
    assert results[0][0] != results[1][0]


def test_next_samples_after_a_resume(ranks: RankPool, tmp_path: Path):
    """CASES G1: ten rows, batches of two, stopped after two steps: positions 4 and 5 come next."""
    (tmp_path / "text.txt").write_text("\n".join("abcdefghij"))
    flags = jobs.flags_of(tmp_path / "run", *EXACT, "--global-batch-size", "2")
    ranks(1).run(jobs.train, flags)
    [start] = ranks(1).run(jobs.resume, [*flags, "--ckpt-step", "2"])
    assert start["progress"] == (2, 4)
    order = SampleOrder(num_samples=10, seed=5)
    assert order.take(4, 2) == order.take(0, 10)[4:6]


@pytest.mark.slow
@pytest.mark.parametrize("size, flags", [(1, ""), (2, f"{TP2_SP} {DISTRIBUTED}")])
def test_megatron_loads_ours_and_we_load_megatrons(
    ranks: RankPool, tmp_path: Path, size: int, flags: str
):
    """Ours -> loaded and saved by Megatron -> loaded and saved by us: nothing changes."""
    command = jobs.flags_of(tmp_path / "run", *DROPOUT, *flags.split(), "--train-iters", "2")
    ours, theirs, again = tmp_path / "run" / "saved", tmp_path / "theirs", tmp_path / "again"
    ranks(size).run(jobs.train, command)
    ranks(size).run(jobs.saved_again, command, theirs, by_megatron=True)
    load = ["--load", str(theirs), "--save", str(again)]
    ranks(size).run(jobs.saved_again, [*command, *load], again, by_megatron=False)
    for folder in (theirs, again):
        [differ] = ranks(1).run(jobs.differences, folder_of(ours, 2), folder_of(folder, 2))
        assert all(name.startswith(("megatron_ext", "num_floating")) for name in differ)
