"""Whatever is batched, shared, interrupted or evicted, a sequence gets the tokens it gets alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from megatron_ext.rollout.config import RolloutConfig
from megatron_ext.rollout.engine import RolloutEngine
from megatron_ext.rollout.sampling import draw
from megatron_ext.rollout.session import RolloutSession
from megatron_ext.rollout.types import Completion, Request, SamplingParams, samples_of
from megatron_ext.rollout.uniforms import UniformStream
from tests.rollout.toy_model import ToyDecoder

CONTEXT, VOCABULARY = 96, 19


def engine_of(model: ToyDecoder, **options: object) -> RolloutEngine:
    """An engine with these rollout_ options."""
    config = RolloutConfig(**{f"rollout_{name}": value for name, value in options.items()})
    return RolloutEngine(model, config)


def naive_turn(
    model: ToyDecoder, context: Sequence[int], request: Request, budget: int
) -> tuple[list[int], list[float]]:
    """Sample token by token, everything computed from scratch."""
    tokens, logprobs, context = [], [], list(context)
    stream = UniformStream(seed=request.seed, sample=request.sample)
    while len(tokens) < budget and len(context) < model.max_context:
        drawn = draw(
            model.full_logits(context)[-1:],
            params=[request.sampling],
            uniforms=[stream.at(len(context))],
        )
        tokens += drawn.tokens
        logprobs += drawn.logprobs
        context += drawn.tokens
        if tokens[-1] in request.stop_ids:
            break
    return tokens, logprobs


def check_turn(
    model: ToyDecoder, context: Sequence[int], request: Request, budget: int, found: Completion
) -> None:
    """A turn is the naive one, token for token."""
    tokens, logprobs = naive_turn(model, context, request, budget)
    assert list(found.token_ids) == tokens
    assert found.logprobs == pytest.approx(logprobs, abs=1e-9)
    assert found.first_position == len(context)
    if tokens and tokens[-1] in request.stop_ids:
        assert (found.stop_reason, found.stopped_by) == ("stop", tokens[-1])
    else:
        assert found.stop_reason == ("length" if len(tokens) == budget else "context")


def random_requests(rng: random.Random, *, count: int) -> list[Request]:
    """Prompts of 1 to 60 tokens, many beginning alike, in groups of samples."""
    beginnings = [[rng.randrange(VOCABULARY) for _ in range(40)] for _ in range(3)]
    requests = []
    while len(requests) < count:
        own = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 20))]
        prompt = rng.choice(beginnings)[: rng.choice([0, 0, 12, 40])] + own
        request = Request(
            prompt_ids=tuple(prompt),
            max_new_tokens=rng.randint(1, 25),
            sampling=SamplingParams(temperature=rng.choice([0, 0.7, 1.0])),
            seed=rng.randrange(5),
            stop_ids=frozenset({rng.randrange(VOCABULARY)}),
        )
        requests += samples_of(request, rng.choice([1, 1, 4]))
    return requests


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"slots": 1},
        {"slots": 5, "prefill_tokens": 7},
        {"slots": 8, "cache_tokens": 200},
        {"slots": 6, "share_prefill": False},
    ],
    ids=str,
)
def test_generate_equals_one_by_one_from_scratch(options):
    model = ToyDecoder()
    requests = random_requests(random.Random(1), count=24)
    completions = engine_of(model, **options).generate(requests)
    for request, found in zip(requests, completions, strict=True):
        check_turn(model, request.prompt_ids, request, request.max_new_tokens, found)
    limit = options.get("cache_tokens", 0)
    for plan in model.plans:
        assert not limit or plan.num_slots * plan.capacity <= limit
        assert plan.num_slots <= options.get("slots", 32)
        assert len(plan.tokens) - plan.num_running <= options.get("prefill_tokens", 512)


def test_samples_differ_and_come_again():
    model = ToyDecoder()
    request = Request(prompt_ids=(1, 2, 3), max_new_tokens=12, seed=4)
    first = [c.token_ids for c in engine_of(model).generate(samples_of(request, 6))]
    again = [c.token_ids for c in engine_of(model, slots=2).generate(samples_of(request, 6))]
    other = [
        c.token_ids for c in engine_of(model).generate(samples_of(replace(request, seed=5), 6))
    ]
    assert len({*first, *other}) == 12
    assert first == again


def test_a_prompt_is_computed_once_for_its_samples():
    model = ToyDecoder()
    request = Request(prompt_ids=tuple(range(18)) * 2, max_new_tokens=3)
    engine = engine_of(model)
    engine.generate(samples_of(request, 8))
    assert engine.session.stats.positions == 36 + 8 * 2
    assert engine.session.stats.positions_shared == 7 * 36


def test_a_finished_sequences_slot_is_refilled_at_once():
    """Prompts of one token, so a request of n tokens takes n steps, whoever sits beside it."""
    model, budgets = ToyDecoder(), [1, 9, 3, 3, 12, 1, 1, 5, 2, 7]
    requests = [Request(prompt_ids=(1,), max_new_tokens=n, seed=n) for n in budgets]
    engine_of(model, slots=3).generate(requests)
    waiting, running, expected = list(budgets), [], []
    while waiting or running:
        free = 3 - len(running)
        running, waiting = [*running, *waiting[:free]], waiting[free:]
        expected.append(len(running))
        running = [left - 1 for left in running if left > 1]
    assert [len(plan.tokens) for plan in model.plans] == expected


@pytest.mark.parametrize("seed", range(8))
def test_any_program_of_turns_and_interruptions(seed):
    """Submit, extend, release and change weights at random; every turn must be the naive one."""
    rng = random.Random(seed)
    model = ToyDecoder()
    engine = engine_of(
        model,
        slots=rng.randint(1, 6),
        prefill_tokens=rng.randint(3, 30),
        cache_tokens=rng.choice([0, 130, 300]),
    )
    waiting = random_requests(rng, count=14)
    turns: dict[int, tuple[Request, int, int]] = {}

    def act(session: RolloutSession) -> None:
        for _ in range(rng.randint(1, 25)):
            if waiting and rng.random() < 0.5:
                request = waiting.pop()
                ticket = session.submit(request, keep=True)
                turns[ticket] = (request, request.max_new_tokens, 0)
            for found in session.step():
                finish(session, found)

    def finish(session: RolloutSession, found: Completion) -> None:
        request, budget, played = turns.pop(found.ticket)
        context = session.context(found.ticket)
        assert context[found.first_position :] == found.token_ids
        check_turn(model, context[: found.first_position], request, budget, found)
        if played == 3 or rng.random() < 0.3:
            session.release(found.ticket)
            return
        budget = rng.randint(0, 8)
        reply = [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 12))]
        session.extend(found.ticket, reply, max_new_tokens=budget)
        turns[found.ticket] = (request, budget, played + 1)

    while waiting or turns:
        engine.run(act)
        if rng.random() < 0.2 and turns:
            gone = rng.choice(list(turns))
            engine.session.release(gone)
            del turns[gone]
    assert engine.session.num_unfinished == 0
    assert not engine.scheduler.has_work


def test_twenty_turns_keep_every_id():
    model = ToyDecoder(max_context=300)
    request = Request(prompt_ids=(3, 1), max_new_tokens=6, stop_ids=frozenset({0}))
    engine = engine_of(model)
    expected = list(request.prompt_ids)

    def drive(session: RolloutSession) -> tuple[int, ...]:
        ticket = session.submit(request, keep=True)
        for turn in range(20):
            found: list[Completion] = []
            while not found:
                found = session.step()
            expected.extend(found[0].token_ids)
            reply = [turn % VOCABULARY, 7, 7]
            expected.extend(reply)
            session.extend(ticket, reply, max_new_tokens=6)
        return session.context(ticket)

    assert engine.run(drive) == tuple(expected)
    sampled = engine.session.stats.sampled_tokens
    # the last token of a turn and the reply are all that a turn computes beside its own tokens
    assert engine.session.stats.positions == 2 + sampled - 1 + 3 * 19


@pytest.mark.parametrize(("budget", "first"), [(10, 5), (8, 5)], ids=["F10", "F5"])
def test_interrupted_sequences_keep_tokens_budget_and_versions(budget, first):
    """Of CASES.md: some tokens by version 3, then new weights, then the others by version 4."""
    model = ToyDecoder()
    engine = engine_of(model)
    request = Request(prompt_ids=(5, 6), max_new_tokens=budget, seed=1)

    def begin(session: RolloutSession) -> None:
        session.submit(request)
        for _ in range(first):
            assert session.step() == []

    def end(session: RolloutSession) -> Completion:
        while session.num_unfinished:
            ended = session.step()
        return ended[0]

    engine.run(begin, version=3)
    before = naive_turn(model, request.prompt_ids, request, first)
    model.set_weights(1)
    found = engine.run(end, version=4)
    after = naive_turn(model, [*request.prompt_ids, *before[0]], request, budget - first)
    assert list(found.token_ids) == before[0] + after[0]
    assert found.logprobs == pytest.approx(before[1] + after[1], abs=1e-9)
    assert found.versions == (3,) * first + (4,) * (budget - first)
    assert found.stop_reason == "length"


def test_end_of_text_that_is_also_padding_ends_once():
    request = Request(
        prompt_ids=(0, 0, 4),
        max_new_tokens=90,
        sampling=SamplingParams(temperature=5.0),
        stop_ids=frozenset({0}),
    )
    stopped = [
        found
        for found in engine_of(ToyDecoder()).generate(samples_of(request, 6))
        if found.stop_reason == "stop"
    ]
    assert stopped
    assert all(c.token_ids[-1] == 0 and c.token_ids.count(0) == 1 for c in stopped)


def test_no_budget_and_full_context_give_empty_or_short_completions():
    model = ToyDecoder()
    engine = engine_of(model)
    prompt = tuple([1] * (CONTEXT - 2))
    none, full = engine.generate(
        [
            Request(prompt_ids=(1,), max_new_tokens=0),
            Request(prompt_ids=prompt, max_new_tokens=9),
        ]
    )
    assert (none.token_ids, none.stop_reason) == ((), "length")
    assert (len(full.token_ids), full.stop_reason) == (2, "context")

    def overflow(session: RolloutSession) -> Completion:
        ticket = session.submit(Request(prompt_ids=prompt, max_new_tokens=1), keep=True)
        session.step()
        session.extend(ticket, [1] * 5, max_new_tokens=4)
        return session.step()[0]

    found = engine.run(overflow)
    assert (found.token_ids, found.stop_reason) == ((), "context")
