"""What the engine refuses, and what reaches the completion."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from megatron_ext.rollout.engine import RolloutEngine
from megatron_ext.rollout.session import RolloutSession
from megatron_ext.rollout.types import Completion, Request, samples_of
from tests.rollout.test_engine import CONTEXT, VOCABULARY, engine_of
from tests.rollout.toy_model import ToyDecoder

ROCKET = "\U0001f680"


def test_requests_that_cannot_be_sampled_are_named_together_and_none_is_queued():
    engine = engine_of(ToyDecoder())
    with pytest.raises(ValueError) as raised:
        engine.generate(
            [
                Request(prompt_ids=(1,), max_new_tokens=1),
                Request(prompt_ids=(), max_new_tokens=-1),
                Request(prompt_ids=(1,) * CONTEXT, max_new_tokens=1),
                Request(prompt_ids=(VOCABULARY,), max_new_tokens=1, seed=-1),
            ]
        )
    text = str(raised.value)
    for part in (
        "request 1: the prompt has no token",
        "request 1: max_new_tokens -1",
        f"request 2: the prompt of {CONTEXT} tokens leaves no room",
        f"request 3: tokens [{VOCABULARY}] are not in the vocabulary",
        "request 3: seed -1",
    ):
        assert part in text
    assert engine.session.num_unfinished == 0


def test_wrong_calls_say_what_to_do():
    model = ToyDecoder()
    engine = engine_of(model)

    def misuse(session: RolloutSession) -> None:
        ticket = session.submit(Request(prompt_ids=(1,), max_new_tokens=3), keep=True)
        with pytest.raises(ValueError, match="after its turn"):
            session.extend(ticket, [1], max_new_tokens=1)
        with pytest.raises(ValueError, match="not known"):
            session.context(ticket + 1)
        while not session.step():
            pass
        with pytest.raises(ValueError, match="not in the vocabulary"):
            session.extend(ticket, [-1], max_new_tokens=1)
        session.submit(Request(prompt_ids=(1,), max_new_tokens=9))

    engine.run(misuse)
    with pytest.raises(ValueError, match="1 unfinished"):
        engine.generate([])
    with pytest.raises(ValueError, match="less than the context"):
        engine_of(model, cache_tokens=CONTEXT - 1)


def test_an_error_while_completions_are_reported_leaves_nothing_behind():
    """Both samples end with the same step; the error comes with the first of them."""
    engine = engine_of(ToyDecoder())

    def fail(completion: Completion) -> None:
        raise KeyError(completion.ticket)

    request = Request(prompt_ids=(1,), max_new_tokens=2)
    longer = replace(request, max_new_tokens=9)
    with pytest.raises(KeyError):
        engine.generate([*samples_of(request, 2), longer], on_completion=fail)
    assert engine.session.num_unfinished == 0
    assert len(engine.generate([longer])[0].token_ids) == 9


def test_a_stop_string_whose_character_spans_tokens_ends_the_completion():
    """Two tokens that follow each other somewhere are the halves of one character."""
    model, request = ToyDecoder(), Request(prompt_ids=(2,), max_new_tokens=20, seed=3)
    [free] = RolloutEngine(model).generate([request])
    pair = next(p for p in pairwise(free.token_ids[5:]) if p[0] != p[1])
    end = list(pairwise(free.token_ids)).index(pair) + 2
    table = [b"."] * VOCABULARY
    table[pair[0]], table[pair[1]] = ROCKET.encode()[:2], ROCKET.encode()[2:]
    engine = RolloutEngine(model, token_bytes=table)
    [found] = engine.generate([replace(request, stop_strings=(ROCKET,))])
    assert found.token_ids == free.token_ids[:end]
    assert (found.stop_reason, found.stopped_by) == ("stop", ROCKET)


def test_stop_strings_and_top_logprobs_reach_the_completion():
    model = ToyDecoder()
    table = [bytes([97 + token]) for token in range(VOCABULARY)]
    engine = RolloutEngine(model, token_bytes=table)
    plain = Request(prompt_ids=(2,), max_new_tokens=20, seed=3)
    [free] = engine.generate([plain])
    text = b"".join(table[token] for token in free.token_ids).decode()
    [found] = engine.generate([replace(plain, stop_strings=(text[6:9],), top_logprobs=2)])
    assert found.token_ids == free.token_ids[:9]
    assert (found.stop_reason, found.stopped_by) == ("stop", text[6:9])
    assert [len(pairs) for pairs in found.top_logprobs] == [2] * 9
    assert all(
        pairs[0][1] >= p for pairs, p in zip(found.top_logprobs, found.logprobs, strict=True)
    )
