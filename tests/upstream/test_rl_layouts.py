"""One update of every algorithm, on every layout, gives the weights of a single process."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from megatron_ext.rl.presets import PRESETS
from tests.marks import slow_except
from tests.ranks import RankPool
from tests.upstream.jobs import LLAMA, read_tensors, save_initial_weights
from tests.upstream.rl_jobs import EPISODES, GROUP_SIZE, learn_each

SIZES = ["--global-batch-size", str(EPISODES), "--group-size", str(GROUP_SIZE), "--lr", "1e-3"]
ONE_UPDATE = ("reinforce", "rloo")
"""Losses without a ratio."""
CASES = {
    **{
        name: ["--algorithm", name, *([] if name in ONE_UPDATE else ["--minibatches", "2"])]
        for name in PRESETS
    },
    "two epochs": ["--algorithm", "grpo-plus", "--batch-epochs", "2", "--clip-low", "0.01"],
    "entropy": ["--algorithm", "dr-grpo", "--entropy-coefficient", "0.1"],
    "kl in the reward": [
        *("--algorithm", "rloo", "--kl-coefficient", "0.5"),
        *("--kl-placement", "reward", "--kl-estimator", "k1"),
    ],
}
PACKED = ["--packing", "--max-tokens-per-microbatch", "72"]
FLAGS = {
    name: [*LLAMA, *SIZES, *flags, "--rollout-max-new-tokens", "12"]
    for name, flags in CASES.items()
}
LAYOUTS = {
    "dp2": (2, ""),
    "tp2 sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2 vpp2": (
        2,
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    ),
    "dp2 padded": (2, "--micro-batch-size 2"),
    "dp2 tp2 overlap": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer "
        "--overlap-grad-reduce --overlap-param-gather",
    ),
}
FEW = ("grpo", "grpo-plus", "dapo", "gspo", "two epochs")
"""Cases of the layouts that repeat others with another way to reduce or to pad."""
OF_THE_LAYOUT = ("padding_share", "pipeline_sent_bytes")
PARAMETER = 1e-5  # as in test_parity: Adam with --adam-eps 1e-5 leaves fp32 rounding as it is


@pytest.fixture(scope="module")
def single(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory):
    """Where all start from, and what one process makes of it."""

    @cache
    def of() -> tuple[Path, dict]:
        folder = tmp_path_factory.mktemp("single")
        ranks(1).run(save_initial_weights, LLAMA, folder / "initial")
        flags = {case: [*words, *PACKED] for case, words in FLAGS.items()}
        [found] = ranks(1).run(learn_each, flags, folder / "initial", folder, timeout=120)
        return folder, found

    return of


def largest_difference(mine: Path, theirs: Path) -> float:
    """Of two folders of weights, relative to each tensor's largest entry; runs on one rank."""
    a, b = read_tensors(mine), read_tensors(theirs)
    assert a.keys() == b.keys()
    return max(float((a[key] - b[key]).abs().max() / b[key].abs().max()) for key in b)


def differences(out: Path, reference: Path, names: list[str]) -> dict[str, float]:
    """The same for several pairs."""
    return {name: largest_difference(out / name, reference / name) for name in names}


@pytest.mark.parametrize("name", slow_except((), LAYOUTS))
def test_every_layout_learns_what_a_single_process_learns(
    ranks: RankPool, single, tmp_path: Path, name: str
) -> None:
    folder, expected = single()
    size, more = LAYOUTS[name]
    cases = FEW if name in ("dp2 padded", "dp2 tp2 overlap") else CASES
    rows = [] if "padded" in name else PACKED
    flags = {case: [*FLAGS[case], *rows, *more.split()] for case in cases}
    results = ranks(size).run(learn_each, flags, folder / "initial", tmp_path, timeout=200)
    for result in results:
        for case, metrics in result.items():
            wanted = {k: v for k, v in expected[case].items() if k not in OF_THE_LAYOUT}
            found = {k: v for k, v in metrics.items() if k not in OF_THE_LAYOUT}
            assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6), case
    [worst] = ranks(1).run(differences, tmp_path, folder, list(cases))
    assert max(worst.values()) < PARAMETER, worst


@pytest.mark.slow
def test_the_cases_are_not_trivial(ranks: RankPool, single) -> None:
    """Each case moves the weights, and no two move them alike."""
    folder, found = single()
    pairs = {name: largest_difference for name in CASES}
    [moved] = ranks(1).run(moves, folder, list(pairs))
    assert min(moved.values()) > 1e-4, moved
    assert found["two epochs"]["clip_fraction_low"] > 0
    assert found["grpo"]["kl_reference"] > 0
    assert found["entropy"]["entropy"] > 1
    assert found["grpo-plus"]["masked_episodes"] == 1
    assert found["dapo"]["dropped_episodes"] == GROUP_SIZE - 1  # one of them failed


def moves(folder: Path, names: list[str]) -> dict[str, float]:
    """How far each case's weights are from the initial ones."""
    return {name: largest_difference(folder / name, folder / "initial") for name in names}
