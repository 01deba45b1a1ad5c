"""tools/evaluate.py tasks: the same rates and transcripts on every layout, from any source."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.evaluation.pass_rates import wilson_interval
from tests.marks import slow_except
from tests.ranks import RankPool
from tests.weights.tiny_models import MODELS, save
from tools import evaluate

LAYOUTS = {
    "dp2": (2, ""),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
}
FEW = "--num-tasks 6 --samples 2 --k 1 2 --rollout-max-new-tokens 12"
TEXTS = "--tokenizer-type NullTokenizer --max-context 32 --rollout-max-new-tokens 5"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evaluate_tasks") / "llama"
    save(MODELS["llama"], path)
    return path


def run_tool(words: list[str]) -> None:
    """The tool on this rank."""
    evaluate.main(["tasks", *words])


def evaluated(
    ranks: RankPool, model: Path, folder: Path, words: str, *, size: int = 1
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The result and the transcripts of a run."""
    result, transcripts = folder / "result.json", folder / "transcripts.jsonl"
    words += f" --hf-model {model} --output {result} --transcripts {transcripts}"
    ranks(size).run(run_tool, words.split())
    lines = transcripts.read_text(encoding="utf-8").splitlines()
    return json.loads(result.read_text()), [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def on_one_rank(ranks: RankPool, model: Path, tmp_path_factory: pytest.TempPathFactory):
    """The built-in tasks on one rank."""
    return evaluated(ranks, model, tmp_path_factory.mktemp("one"), FEW)


@pytest.mark.parametrize("layout", slow_except((), LAYOUTS))
def test_the_layout_changes_nothing(
    ranks: RankPool, model: Path, tmp_path: Path, on_one_rank, layout: str
):
    size, flags = LAYOUTS[layout]
    found, played = evaluated(ranks, model, tmp_path, f"{FEW} {flags}", size=size)
    expected, episodes = on_one_rank
    assert found.pop("seconds") > 0
    assert found == {name: value for name, value in expected.items() if name != "seconds"}
    assert played == episodes


def test_what_is_said_of_the_built_in_tasks(on_one_rank):
    result, episodes = on_one_rank
    assert (result["num_tasks"], result["num_episodes"], result["num_failed"]) == (6, 12, 0)
    assert result["tasks"] == "arithmetic" and result["max_context"] == 64
    assert set(result["pass_at"]) == {"1", "2"} and result["sampling"]["temperature"] == 1.0
    assert len(episodes) == 12 and len({episode["task"] for episode in episodes}) == 6
    assert result["num_sampled"] == sum(episode["sampled_tokens"] for episode in episodes)
    assert all(episode["parts"][0]["text"].startswith("Q") for episode in episodes)


def test_a_file_is_graded(ranks: RankPool, model: Path, tmp_path: Path):
    """What the model says is made the answer of every second task: half of them pass."""
    tasks = tmp_path / "tasks.jsonl"
    greedy = f"--tasks {tasks} {TEXTS} --rollout-temperature 0 --group-by kind"

    def write(answers: list[str]) -> None:
        records = [
            {"prompt": f"{i}+{i}=", "answer": a, "verifier": "exact", "kind": f"{i % 2}"}
            for i, a in enumerate(answers)
        ]
        tasks.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")

    write(["no such answer"] * 4)
    result, episodes = evaluated(ranks, model, tmp_path, greedy)
    assert result["pass_at"]["1"]["value"] == 0 and result["mean_reward"] == 0
    said = [episode["parts"][1]["text"] for episode in episodes]
    assert all(said) and len(episodes) == 4
    write([text if i % 2 else "no such answer" for i, text in enumerate(said)])
    result, _ = evaluated(ranks, model, tmp_path, greedy)
    assert result["pass_at"] == {"1": vars(wilson_interval(0.5, draws=4))}
    assert {name: rate["value"] for name, rate in result["groups"].items()} == {
        "kind=0": 0,
        "kind=1": 1,
    }


REFUSALS = {
    "--samples 2 --k 3": "--k [3]: each must be from 1 to --samples 2",
    "--tasks nowhere.jsonl --tokenizer-type NullTokenizer": "nowhere.jsonl is no file",
    "--num-tasks 0": "--num-tasks: 0 must be at least 1",
    "--output /no/such/folder/a.json": "there is no folder",
    "--seq-length 5": "the longest sequence here is --max-context",
    "--max-context 4 --num-tasks 1": "all 1 episodes failed",
}


def refusals(model: Path) -> list[str]:
    """What the tool says to each."""
    said = []
    for words in REFUSALS:
        with io.StringIO() as text, contextlib.redirect_stderr(text):
            with pytest.raises(SystemExit):
                run_tool([*words.split(), "--hf-model", str(model)])
            said.append(text.getvalue())
    return said


@pytest.mark.slow
def test_what_cannot_be_done_is_said(ranks: RankPool, model: Path):
    (said,) = ranks(1).run(refusals, model)
    for text, problem in zip(said, REFUSALS.values(), strict=True):
        assert problem in text
