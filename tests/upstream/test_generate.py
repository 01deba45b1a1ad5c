"""tools/generate.py: prompts of a file to completions of a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_ext.rollout.prompts import read_prompts
from tests.ranks import RankPool
from tests.upstream.rollout_jobs import run_generate_tool
from tests.weights.tiny_models import MODELS, build


def test_the_file_is_the_same_on_every_layout(ranks: RankPool, tmp_path: Path):
    model = build(MODELS["llama"])
    model.save_pretrained(tmp_path / "model")
    prompts = [{"prompt_ids": [1, 2, 3], "id": "a"}, {"prompt": "AB"}]
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
    assert [(line.get("id"), line["sample"]) for line in first] == [
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
