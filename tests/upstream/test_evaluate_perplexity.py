"""tools/evaluate.py perplexity: what it prints, and two checkpoints on the same tokens."""

from __future__ import annotations

import contextlib
import io
import math
import random
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_ext.evaluation.perplexity import paired_difference, read_scores
from tests.ranks import RankPool
from tests.weights.tiny_models import MODELS, save
from tools import evaluate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, a checkpoint, and the same one with sharper predictions."""
    path = tmp_path_factory.mktemp("perplexity")
    save(MODELS["llama"], path / "before")
    model = AutoModelForCausalLM.from_pretrained(
        path / "before", local_files_only=True, trust_remote_code=False
    )
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    model.save_pretrained(path / "now")
    rng = random.Random(0)
    (path / "text.txt").write_text("".join(rng.choice("ABC XYZ.,") for _ in range(200)))
    return path


def compare(folder: Path) -> list[str]:
    """What is printed of each checkpoint, the second compared with the first; then a refusal."""
    said = []
    for words in (
        f"--hf-model {folder}/before --tokens-out {folder}/before.npz",
        f"--hf-model {folder}/now --tokens-out {folder}/now.npz --compare {folder}/before.npz",
        f"--hf-model {folder}/now --compare {folder}/before.npz --stride 8",
    ):
        words += f" --text {folder}/text.txt --window 16 --tokenizer-type NullTokenizer"
        with io.StringIO() as text, contextlib.redirect_stdout(text):
            with contextlib.redirect_stderr(text), contextlib.suppress(SystemExit):
                evaluate.main(["perplexity", *words.split()])
            said.append(text.getvalue())
    return said


@pytest.mark.slow
def test_the_paired_difference_is_printed(ranks: RankPool, folder: Path):
    ((before, now, refused),) = ranks(1).run(compare, folder)
    scores = {name: read_scores(folder / f"{name}.npz") for name in ("before", "now")}
    difference = paired_difference(scores["now"], scores["before"])
    number = r"([-+]?\d+\.\d+)"
    pair = re.search(rf"this - other {number} \+- {number} nats per token, paired", now)
    assert pair is not None and "this - other" not in before
    assert float(pair[1]) == pytest.approx(difference.value, abs=1e-5)
    assert float(pair[2]) == pytest.approx(difference.standard_error, abs=1e-5)
    for name, text in (("before", before), ("now", now)):
        value = scores[name].nll.double().mean().item()
        found = re.search(rf"perplexity +{number}", text)
        assert found is not None and float(found[1]) == pytest.approx(math.exp(value), abs=1e-3)
    assert "differ in index" in refused and "score both checkpoints on the same text" in refused
