"""Every family of checkpoints samples with the log-probabilities of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_ext.rollout.types import Completion, Request
from tests.marks import slow_except
from tests.ranks import RankPool
from tests.upstream.rollout_jobs import fixed_requests, sample_checkpoints
from tests.weights.tiny_models import BASE, MODELS, WITH_EXPERTS, build

LAYOUTS = {
    "one rank": (1, "", list(MODELS)),
    "tp2": (2, "--tensor-model-parallel-size 2", ["llama tied biased", "deepseek_v3 yarn"]),
    "ep2": (2, "--expert-model-parallel-size 2", WITH_EXPERTS[:1]),
}
LOGPROB = 1e-5  # fp32, sums in another order


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    """Every tiny model of transformers and the folder of its checkpoint."""
    root = tmp_path_factory.mktemp("checkpoints")
    found = {name: (build(tiny), root / name) for name, tiny in MODELS.items()}
    for model, folder in found.values():
        model.save_pretrained(folder)
    return found


def gap_to(model, request: Request, completion: Completion) -> float:
    """Largest difference of the completion's log-probabilities to those of transformers."""
    prompt = [token % BASE["vocab_size"] for token in request.prompt_ids]
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion.token_ids]])).logits[0]
    logprobs = torch.log_softmax(logits / (request.sampling.temperature or 1.0), dim=-1)
    rows = range(len(prompt) - 1, len(prompt) - 1 + len(completion.token_ids))
    if request.sampling.is_greedy:
        assert list(completion.token_ids) == logprobs[list(rows)].argmax(dim=-1).tolist()
    exact = logprobs[list(rows), list(completion.token_ids)]
    return float((exact - torch.tensor(completion.logprobs)).abs().max())


@pytest.mark.parametrize("layout", slow_except({"one rank"}, LAYOUTS))
def test_logprobs_are_those_of_transformers(ranks: RankPool, models, layout: str):
    size, flags, names = LAYOUTS[layout]
    folders: dict[str, Path] = {name: models[name][1] for name in names}
    found = ranks(size).run(sample_checkpoints, folders, flags, timeout=110)
    gaps = {
        name: max(
            gap_to(models[name][0], request, completion)
            for request, completion in zip(fixed_requests(), rank[name], strict=True)
        )
        for rank in found
        for name in names
    }
    assert max(gaps.values()) < LOGPROB, gaps
