"""tools/generate.py: prompts of a file to completions of a file."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.rollout.prompts import read_prompts
from tests.ranks import ENVIRONMENT, ROOT, RankPool
from tests.upstream.rollout_jobs import run_generate_tool
from tests.weights.tiny_models import MODELS, build
from tools import convert_checkpoint, generate


@pytest.mark.slow
def test_the_file_is_the_same_on_every_layout(ranks: RankPool, tmp_path: Path):
    model = build(MODELS["llama"])
    model.save_pretrained(tmp_path / "model")
    prompts = [{"prompt_ids": [1, 2, 3], "id": "a", "sample": 9}, {"prompt": "AB"}]
    (tmp_path / "in.jsonl").write_text("\n\n".join(map(json.dumps, prompts)))
    words = (
        f"--hf-model {tmp_path}/model --prompts {tmp_path}/in.jsonl --max-context 32 --samples 2 "
        "--rollout-max-new-tokens 6 --logprobs --top-logprobs 1 --tokenizer-type NullTokenizer"
    ).split()
    found = {}
    for size, extra in ((1, []), (2, []), (2, ["--tensor-model-parallel-size", "2"])):
        output = tmp_path / f"out{size}{len(extra)}.jsonl"
        ranks(size).run(run_generate_tool, [*words, "--output", str(output), *extra])
        found[output] = [json.loads(line) for line in output.read_text().splitlines()]
    first, *others = found.values()
    assert [(line["metadata"].get("id"), line["sample"]) for line in first] == [
        ("a", 0),
        ("a", 1),
        (None, 0),
        (None, 1),
    ]
    for line in first:
        assert len(line["token_ids"]) == len(line["logprobs"]) == len(line["top_logprobs"]) == 6
        assert line["stop_reason"] == "length"
        assert line["completion"] == bytes(line["token_ids"]).decode()
    for other in others:
        assert [x["token_ids"] for x in other] == [x["token_ids"] for x in first]


def test_bad_prompts_are_named_with_their_lines(tmp_path: Path):
    path = tmp_path / "in.jsonl"
    path.write_text(
        '{"prompt": ""}\n[]\n{"prompt": "a", "messages": [{}]}\nx\n{"prompt_ids": ["a"]}'
    )
    with pytest.raises(ValueError) as raised:
        read_prompts(path)
    text = str(raised.value)
    for number, reason in enumerate(
        ["empty or wrong prompt", "not an object", "give one", "not JSON", "not integers"], start=1
    ):
        assert f"line {number} " in text and reason in text
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no prompt"):
        read_prompts(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("generate") / "model"
    build(MODELS["llama"]).save_pretrained(path)
    return path


def test_every_prompt_has_draws_of_its_own(ranks: RankPool, tmp_path: Path):
    """A model that ignores its prompt says other things to each, and the same to it anywhere."""
    model = build(MODELS["llama"])
    model.lm_head.weight.data.zero_()
    model.save_pretrained(tmp_path / "model")
    words = f"--hf-model {tmp_path}/model --tokenizer-type NullTokenizer --samples 2"
    words += f" --rollout-max-new-tokens 12 --prompts {tmp_path}/in --output {tmp_path}/out"

    def said(*prompts: list[int]) -> list[list[int]]:
        lines = "\n".join(json.dumps({"prompt_ids": prompt}) for prompt in prompts)
        (tmp_path / "in").write_text(lines)
        ranks(1).run(run_generate_tool, words.split())
        return [json.loads(x)["token_ids"] for x in (tmp_path / "out").read_text().splitlines()]

    alone, among = said([1, 2]), said([1, 3], [1, 2], [1, 2])
    assert among[2:4] == alone
    assert len(set(map(tuple, among))) == 6


REFUSALS = [
    ({"prompt": "A"}, "--samples 0", "--samples: 0 must be at least 1"),
    ({"prompt": "A" * 40}, "", "prompt 1: 40 tokens leave no room in --max-context 32"),
    ({"prompt_ids": [99]}, "", "prompt 1: ids from 99 to 99, but the vocabulary has 99: use"),
    ({"messages": [{"content": "A"}]}, "", "line 1 has messages without a `role`"),
    ({"prompt": "A"}, "--top-logprobs -1", "--top-logprobs: -1 must be at least 0"),
    ({"prompt": "A"}, "--output /no/such/folder/out", "there is no folder /no/such/folder"),
    ({"prompt": "A"}, "--hf-model /no/such/model", "/no/such/model"),
]


def refusals(model: Path, folder: Path) -> list[str]:
    """What the tool says of each; the output is as it was before."""
    said = []
    for record, words, _ in REFUSALS:
        (folder / "in.jsonl").write_text(json.dumps(record))
        (folder / "out.jsonl").write_text("as before")
        flags = f"--prompts {folder}/in.jsonl --output {folder}/out.jsonl --max-context 32"
        flags += f" --hf-model {model} --tokenizer-type NullTokenizer {words}"
        with io.StringIO() as text, contextlib.redirect_stderr(text):
            with pytest.raises(SystemExit):
                generate.main(flags.split())
            said.append(text.getvalue())
        assert (folder / "out.jsonl").read_text() == "as before"
    return said


@pytest.mark.slow
def test_what_cannot_be_sampled_is_said_before_anything_runs(
    ranks: RankPool, model: Path, tmp_path: Path
):
    (said,) = ranks(1).run(refusals, model, tmp_path)
    for text, (_, _, problem) in zip(said, REFUSALS, strict=True):
        assert problem in text
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}


@pytest.mark.slow
def test_a_megatron_checkpoint_gives_the_same(ranks: RankPool, model: Path, tmp_path: Path):
    """--load goes before --hf-model, which then only says what the model looks like."""
    other = build(MODELS["llama"])
    other.lm_head.weight.data.neg_()
    other.save_pretrained(tmp_path / "other")
    convert_checkpoint.main([str(model), str(tmp_path / "megatron")])
    (tmp_path / "in.jsonl").write_text('{"prompt_ids": [1, 2, 3]}\n{"prompt_ids": [4]}')
    found = []
    for words in (f"--hf-model {model}", f"--hf-model {tmp_path}/other --load {tmp_path}/megatron"):
        output = tmp_path / f"{len(found)}.jsonl"
        words += f" --prompts {tmp_path}/in.jsonl --output {output} --rollout-max-new-tokens 8"
        ranks(1).run(run_generate_tool, [*words.split(), "--tokenizer-type", "NullTokenizer"])
        found.append(output.read_text())
    assert found[0] == found[1]


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_process_by_itself_and_stop_strings(ranks: RankPool, model: Path, tmp_path: Path):
    """Without torchrun as with it; a stop string ends the text in front of itself."""

    def run(name: str, *words: str, alone: bool = False) -> list[dict]:
        flags = f"--prompts {tmp_path}/in.jsonl --output {tmp_path}/{name} --hf-model {model}"
        flags += " --tokenizer-type NullTokenizer --rollout-max-new-tokens 20"
        if alone:
            ran = subprocess.run(
                [sys.executable, "tools/generate.py", *flags.split(), *words],
                cwd=ROOT,
                env=os.environ | ENVIRONMENT,
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert re.search(rf"{name}: 1 completions, \d+ tokens, [\d.]+ tokens/s", ran.stdout)
        else:
            ranks(1).run(run_generate_tool, [*flags.split(), *words])
        return [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]

    (tmp_path / "in.jsonl").write_text('{"prompt": "A"}')
    (whole,) = run("whole")
    assert len(whole["token_ids"]) == 20 and whole["stop_reason"] == "length"
    stop = whole["completion"][7:9]
    (stopped,) = run("stopped", "--stop", stop, alone=True)
    end = whole["completion"].index(stop)
    assert stopped["completion"] == whole["completion"][:end]
    assert stopped["token_ids"] == whole["token_ids"][: end + 2]
    assert stopped["stop_reason"] == "stop"
