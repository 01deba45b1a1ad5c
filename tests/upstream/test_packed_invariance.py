"""The same loss and gradient for every packing, token budget, normalisation and layout.

Each layout is one job that builds the model once and runs every case on it; the reference is
padded, on one process and without microbatches (tests/references.py).  The layouts marked slow
repeat the same cases on more ranks.  Context parallelism needs Transformer Engine: cp is 1 here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.packing import Sample, allocate
from tests.marks import slow_except
from tests.ranks import RankPool
from tests.upstream.packed_jobs import (
    GRADIENT,
    LOSS,
    TINY_LLAMA,
    Case,
    compare_drawn_steps,
    compare_steps,
    conversations,
    random_sample,
    write_reference,
)

TP2 = "--tensor-model-parallel-size 2"
SP = f"{TP2} --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
VPP2 = "--num-virtual-stages-per-pipeline-rank 2"
LAYOUTS = {
    "dp2": (2, ""),
    "tp2 sp selective recompute": (2, f"{SP} --recompute-activations"),
    "pp2 vpp2": (2, f"{PP2} {VPP2}"),
    "dp1": (1, ""),
    "dp4": (4, ""),
    "tp2": (2, TP2),
    "pp2": (2, PP2),
    "pp4": (4, "--pipeline-model-parallel-size 4"),
    "tp2 pp2 vpp2 sp": (4, f"{SP} {PP2} {VPP2}"),
}
MODES = ("token-sum", "global-token-mean", "row-mean", "sample-mean", "turn-mean", "constant")
BUDGETS = (40, 64, 256)
"""Rows a little longer than the longest sequence, of a few, and of the whole batch."""

PADDED = {"max_tokens_per_microbatch": 64}


def packed(budget: int, **options: object) -> dict[str, object]:
    """Options of packed rows."""
    return {"packing": True, "max_tokens_per_microbatch": budget, **options}


def rows_of(samples: list[Sample], budget: int, *, flags: str, size: int) -> tuple:
    """Which samples share a row on a layout, over all replicas; what row-mean depends on."""
    pipeline = 4 if "size 4" in flags else 2 if PP2 in flags else 1
    replicas = size // pipeline // (2 if TP2 in flags else 1)
    ranks = allocate(
        [len(s.tokens) for s in samples],
        max_tokens=budget,
        data_parallel_size=replicas,
        pipeline_size=pipeline,
        group_size=pipeline if VPP2 in flags else None,
    )
    return tuple(tuple(row) for rank in ranks for row in rank if row)


def cases_of(name: str) -> list[Case]:
    """Packing off and on, three budgets, six modes, the article's three denominators."""
    size, flags = LAYOUTS[name]
    both = (packed(64), PADDED) if size < 4 else (packed(64),)
    layouts = [
        Case(micro_batch_size=3),
        *(Case(packing={"max_tokens_per_microbatch": budget}) for budget in BUDGETS),
        *(Case(packing=packed(budget)) for budget in BUDGETS),
        Case(packing=packed(64, pad_rows_to_capacity=True, max_sequences_per_row=3)),
    ]
    modes = [
        Case(mode=mode, packing=packing)
        for mode in MODES
        if mode not in ("global-token-mean", "row-mean")
        for packing in both
    ]
    rows = rows_of(conversations(), 64, flags=flags, size=size)
    denominators = [
        Case(mode="sample-mean", packing=packed(64, loss_denominator=denominator))
        for denominator in ("one", "global-batch-size")
    ]
    return [
        *layouts,
        *modes,
        *(Case(mode="row-mean", packing=p, rows=rows if p.get("packing") else None) for p in both),
        *denominators,
    ]


@pytest.fixture(scope="module")
def reference(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights all layouts start from, and the plain results of all their cases."""
    file = tmp_path_factory.mktemp("packed") / "reference.pt"
    cases = [case for name in LAYOUTS for case in cases_of(name)]
    ranks(1).run(write_reference, TINY_LLAMA, cases, file, conversations())
    return file


def check(results: list[list[dict]], cases: list[Case]) -> None:
    """Every case on every rank, with all that differ in one message."""
    wrong = [
        f"rank {rank}, {case}: {found}"
        for rank, of_rank in enumerate(results)
        for case, found in zip(cases, of_rank, strict=True)
        if not (found["loss"] < LOSS and found["gradient"] < GRADIENT)
    ]
    assert not wrong, "\n".join(["", *wrong])


@pytest.mark.parametrize("name", slow_except({"dp2"}, LAYOUTS))
def test_a_layout_computes_the_plain_gradient(ranks: RankPool, reference: Path, name: str) -> None:
    size, flags = LAYOUTS[name]
    cases = cases_of(name)
    results = ranks(size).run(
        compare_steps,
        [*TINY_LLAMA, *flags.split()],
        cases,
        reference,
        conversations(),
        timeout=100,
    )
    check(results, cases)


FEW = [random_sample([False, True, True], seed=1), random_sample([True] * 9, seed=2)]
UNTRAINED = [random_sample([False] * n, seed=n) for n in (30, 20, 10, 3)]


@pytest.mark.parametrize(
    "samples", [FEW, [*UNTRAINED, *FEW[:1]]], ids=["only a filler", "only masked tokens"]
)
def test_replicas_with_nothing_to_train(ranks: RankPool, tmp_path: Path, samples: list) -> None:
    """CASES A13: such a replica joins every collective and adds nothing."""
    cases = [Case(packing=packing) for packing in (PADDED, packed(40))]
    cases += [Case(mode="sample-mean", packing=packed(40)), Case(mode="token-sum")]
    ranks(1).run(write_reference, TINY_LLAMA, cases, tmp_path / "reference.pt", samples)
    results = ranks(4).run(compare_steps, TINY_LLAMA, cases, tmp_path / "reference.pt", samples)
    check(results, cases)
    for of_case in zip(*results, strict=True):
        trained = [found["trained here"] for found in of_case]
        assert min(trained) == 0 < max(trained)


def test_drawn_lengths_and_masks(ranks: RankPool) -> None:
    assert ranks(2).run(compare_drawn_steps, TINY_LLAMA, num_examples=12) == [12, 12]


@pytest.mark.slow
def test_bf16_is_near(ranks: RankPool, reference: Path) -> None:
    """A smoke test: bf16 rounds at 4e-3, and errors of several layers add up."""
    cases = [Case(), Case(packing=packed(64)), Case(mode="turn-mean", packing=packed(64))]
    flags = [*TINY_LLAMA, "--bf16", *SP.split()]
    for of_rank in ranks(2).run(compare_steps, flags, cases, reference, conversations()):
        for found in of_rank:
            assert found["loss"] < 0.02
            assert 1e-4 < found["gradient"] < 0.1
