"""Bad paths and numbers of every tool: status 2 and one message with a flag that the tool has."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

from tools import (
    benchmark,
    convert_checkpoint,
    convert_dialogues,
    evaluate,
    generate,
    make_random_checkpoint,
    self_check,
)

TOOLS = {
    "benchmark": benchmark.main,
    "convert_checkpoint": convert_checkpoint.main,
    "convert_dialogues": convert_dialogues.main,
    "evaluate": evaluate.main,
    "generate": generate.main,
    "make_random_checkpoint": make_random_checkpoint.main,
    "self_check": self_check.main,
}
PERPLEXITY, TASKS = "evaluate perplexity --text T/t.txt", "evaluate tasks --hf-model T/none"
GENERATE = "generate --prompts T/p.jsonl --output T/out.jsonl --hf-model T/none"
MLA = "convert_checkpoint T/none T/out --to mla"
REFUSED = {
    # command line (T = a folder with t.txt, p.jsonl and d.json): what its message names
    f"{PERPLEXITY}": "no checkpoint: give --hf-model",
    f"{PERPLEXITY} --hf-model T/none": "--hf-model T/none does not exist",
    f"{PERPLEXITY} --hf-model T": "config.json",
    f"{PERPLEXITY} --hf-model T/none --window 0": "--window",
    f"{PERPLEXITY} --hf-model T/none --window nan": "--window",
    f"{PERPLEXITY} --hf-model T/none --stride -1": "--stride",
    f"{PERPLEXITY} --hf-model T/none --max-windows 0": "--max-windows",
    f"{PERPLEXITY} --hf-model T/none --tokens-out T/no/x.npz": "--tokens-out",
    f"{PERPLEXITY} --hf-model T/none --tokens-out /proc/x.npz": "--tokens-out",
    f"{PERPLEXITY} --hf-model T/none --compare T/none.npz": "none.npz",
    f"{PERPLEXITY} --hf-model T/none --lr nan": "--lr nan",
    f"{PERPLEXITY} --hf-model T/none --seed": "--seed",
    f"{PERPLEXITY} --hf-model T/none --windows 8": "--windows",
    f"{PERPLEXITY} --load T/t.txt": "--load T/t.txt is a file",
    f"{TASKS} --samples 0": "--samples",
    f"{TASKS} --k 2": "--k",
    f"{TASKS} --num-tasks -1": "--num-tasks",
    f"{TASKS} --max-context 1": "--max-context",
    f"{TASKS} --output T": "--output",
    f"{TASKS} --transcripts /proc/x": "--transcripts",
    f"{TASKS} --sampling-seed 99999999999999999999": "--sampling-seed",
    f"{TASKS} --rollout-top-p 2": "--rollout-top-p 2.0",
    GENERATE: "--hf-model T/none does not exist",
    "generate --prompts T/none --output T/out.jsonl --hf-model T/none": "--prompts",
    "generate --prompts T --output T/out.jsonl --hf-model T/none": "--prompts",
    "generate --prompts T/p.jsonl --output T --hf-model T/none": "--output",
    "generate --prompts T/p.jsonl --output /proc/x --hf-model T/none": "--output",
    f"{GENERATE} --samples 0": "--samples",
    f"{GENERATE} --max-context nan": "--max-context",
    f"{GENERATE} --top-logprobs -1": "--top-logprobs",
    f"{GENERATE} --rollout-temperature nan": "--rollout-temperature nan",
    "self_check --hf-model T/none": "--hf-model T/none does not exist",
    "self_check": "no checkpoint: give --hf-model",
    "self_check --hf-model T/none --seq-length 0": "--seq-length",
    "self_check --hf-model T/none --scratch-dir T/t.txt/x": "--scratch-dir",
    "convert_checkpoint T/none T/out": "T/none does not exist",
    "convert_checkpoint T T/out": "T is no checkpoint",
    "convert_checkpoint T/t.txt T/out": "T/t.txt",
    "convert_checkpoint T/none T/out --ckpt-step -1": "--ckpt-step",
    "convert_checkpoint T/none T/out --max-shard-size 0": "--max-shard-size",
    "convert_checkpoint T/none T/out --max-shard-size -5GB": "--max-shard-size",
    MLA: "T/none does not exist",
    f"{MLA} --cache-ratio nan": "--cache-ratio",
    f"{MLA} --cache-ratio -1": "--cache-ratio",
    f"{MLA} --kv-rank -1": "--kv-rank",
    f"{MLA} --calibration-tokens 99999999999999999999": "--calibration-tokens",
    f"{MLA} --evaluation-window 0": "--evaluation-window",
    f"{MLA} --evaluation-text T/none": "--evaluation-text",
    f"{MLA} --calibration-data T": "--calibration-data",
    f"{MLA} --megatron-output T": "--megatron-output",
    "make_random_checkpoint T/out --num-layers 0": "--num-layers",
    "make_random_checkpoint T/out --hidden-size nan": "--hidden-size",
    "make_random_checkpoint T/out --seed -1": "--seed",
    "make_random_checkpoint T/out --hidden-size 3": "head_dim is 0",
    "make_random_checkpoint T/t.txt --num-layers 1 --hidden-size 64": "T/t.txt",
    "make_random_checkpoint /proc/x --num-layers 1 --hidden-size 64": "/proc/x",
    "convert_dialogues T/none T/out.jsonl": "T/none",
    "convert_dialogues T T/out.jsonl": "T",
    "convert_dialogues T/t.txt T/out.jsonl": "T/t.txt",
    "convert_dialogues T/d.json T": "output T is a folder",
    "convert_dialogues T/d.json /proc/x": "/proc/x",
    "convert_dialogues T/d.json T/out.jsonl --min-reward nan": "--min-reward",
    "convert_dialogues T/d.json T/out.jsonl --valid-every 1": "--valid-every",
    "convert_dialogues T/d.json T/out.jsonl --valid-output T/no/x": "--valid-output",
    "benchmark no-such": "no benchmark no-such",
    "benchmark logprobs --tokens 0": "--tokens",
    "benchmark logprobs --tokens -8": "--tokens",
    "benchmark logprobs --output /proc/x": "--output",
    "benchmark logprobs --output T": "--output",
    "benchmark grpo --lr nan": "--lr",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """T of the command lines."""
    made = tmp_path_factory.mktemp("tools")
    (made / "t.txt").write_text("a text of some words " * 9, encoding="utf-8")
    (made / "p.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n", encoding="utf-8")
    (made / "d.json").write_text("[]", encoding="utf-8")
    return made


@pytest.mark.parametrize("line", REFUSED)
def test_r9_a_tool_refuses_in_one_message(line: str, folder: Path):
    def here(text: str) -> str:
        return re.sub(r"\bT\b", str(folder), text)

    name, *words = here(line).split()
    said = io.StringIO()
    with pytest.raises(SystemExit) as stop, contextlib.redirect_stderr(said):
        TOOLS[name](words)
    assert stop.value.code == 2
    message = said.getvalue().split("error:", 1)[-1]
    assert here(REFUSED[line]) in message, message
    assert "pretrain_rl.py" not in said.getvalue().replace("are those of pretrain_rl.py", "")
    assert "Traceback" not in message
