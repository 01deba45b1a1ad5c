"""What a rank does in the tests of supervised runs: whole jobs of pretrain_rl.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pretrain_rl

FLAGS = (
    *("--num-layers", "4", "--hidden-size", "16", "--num-attention-heads", "4"),
    *("--group-query-attention", "--num-query-groups", "2", "--ffn-hidden-size", "24"),
    *("--position-embedding-type", "rope", "--swiglu", "--normalization", "RMSNorm"),
    *("--disable-bias-linear", "--untie-embeddings-and-output-weights"),
    *("--attention-dropout", "0.1", "--hidden-dropout", "0.1", "--adam-eps", "1e-5"),
    *("--seq-length", "128", "--train-iters", "4", "--lr", "1e-2", "--seed", "5"),
    *("--global-batch-size", "4", "--no-report-html", "--no-tensorboard-events"),
    *("--progress-interval-seconds", "0"),
)
CLOCK = {"seconds", "tokens_per_second", "peak_memory_bytes"}


def write_chats(path: Path, *, number: int) -> Path:
    """Chats of one or two questions with tool calls between, of different lengths."""
    lines = []
    for i in range(number):
        question = {"role": "user", "content": f"{'?' * (i % 5)} {i}"}
        call = {"function": {"name": "f", "arguments": {"i": i}}}
        first = [question, {"role": "assistant", "content": f"a{i}"}]
        second = [
            question,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": str(i)},
            {"role": "assistant", "content": "b" * (1 + i % 3)},
        ]
        lines.append(json.dumps({"messages": first if i % 2 else second}))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def train(folder: Path, out: str, *more: str) -> list[dict[str, Any]]:
    """Train on the folder's chats; the metrics of every step but for what a clock decides."""
    pretrain_rl.main(
        [
            *FLAGS,
            *("--train-data", str(folder / "train.jsonl"), "--output-dir", str(folder / out)),
            *more,
        ]
    )
    lines = (folder / out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if name not in CLOCK}
        for line in lines
    ]
