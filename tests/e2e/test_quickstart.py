"""The quickstart's own command line, shortened: it learns, and without a signal it does not."""

from __future__ import annotations

import re
from pathlib import Path
from shlex import split

import pytest

from tests.ranks import ROOT, RankPool
from tests.upstream.rl_jobs import metrics_of, run

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]
WARM_STEPS, STEPS = 280, 10
QUIET = "--no-report-html --no-tensorboard-events --progress-interval-seconds 0 "
SHORT_WARM_START = f"{QUIET}--train-iters {WARM_STEPS}"
SHORT = f"{QUIET}--train-iters {STEPS} --eval-every 100 --eval-count 192 --save-interval 100"


def words_of(name: str, folder: Path) -> list[str]:
    """A list of flags in run.sh, with its variables filled in."""
    script = (ROOT / "examples/quickstart/run.sh").read_text(encoding="utf-8")
    found = re.search(rf"^{name}=\(\n(.*?)^\)", script, re.DOTALL | re.MULTILINE)
    assert found is not None, name
    variables = {"SEED": "1", "OUTPUT_DIR": str(folder), "WARM_START": str(folder / "warm_start")}
    return split(re.sub(r"\$(\w+)", lambda match: variables[match[1]], found[1]))


@pytest.fixture(scope="module")
def folder(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run after its warm start."""
    folder = tmp_path_factory.mktemp("quickstart")
    words = [*words_of("MODEL", folder), *words_of("DEMONSTRATIONS", folder)]
    ranks(2).run(run, [*words, *split(SHORT_WARM_START)], timeout=600)
    return folder


def improvement(ranks: RankPool, folder: Path, out: str, *more: str) -> tuple[float, float]:
    """Greedy held-out pass rate before and after a few steps of reinforcement."""
    saved = str(folder / out / "saved")
    words = [*words_of("MODEL", folder), *words_of("REINFORCEMENT", folder), *split(SHORT)]
    words += ["--output-dir", str(folder / out), "--save", saved, "--load", saved, *more]
    ranks(2).run(run, words, timeout=600)
    first, *_, last = metrics_of(folder / out)
    return first["eval_pass_rate"], last["eval_pass_rate"]


def test_it_learns(ranks: RankPool, folder: Path) -> None:
    before, after = improvement(ranks, folder, "learns")
    assert 0.1 < before < 0.6
    assert after > before + 0.15


def test_with_shuffled_rewards_it_does_not(ranks: RankPool, folder: Path) -> None:
    before, after = improvement(ranks, folder, "shuffled", "--shuffle-rewards")
    assert after < before + 0.05
