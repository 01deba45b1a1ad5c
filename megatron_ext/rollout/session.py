"""Driving the engine step by step: submit, step, read what ended, continue."""

from __future__ import annotations

import time
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron_ext.rollout.sampling import draw
from megatron_ext.rollout.scheduler import Scheduler
from megatron_ext.rollout.sequence import Sequence
from megatron_ext.rollout.step_plan import StepPlan
from megatron_ext.rollout.stops import StopMatcher
from megatron_ext.rollout.types import Completion, Request

if TYPE_CHECKING:
    from megatron_ext.rollout.engine import Decoder


@dataclass(frozen=True, kw_only=True)
class RolloutStats:
    """What an engine has done since it was built."""

    steps: int = 0
    sampled_tokens: int = 0
    positions: int = 0
    """Tokens that went through the model."""
    positions_shared: int = 0
    """Prompt tokens whose cache was copied from another sequence."""
    positions_without_cache: int = 0
    """Tokens that would have gone through the model if every draw started from scratch."""
    model_seconds: float = 0.0
    sampling_seconds: float = 0.0

    def since(self, earlier: RolloutStats) -> RolloutStats:
        """What was done after `earlier`."""
        return RolloutStats(
            **{name: value - getattr(earlier, name) for name, value in vars(self).items()}
        )


class RolloutSession:
    """Sequences of one engine; made by it, used inside `RolloutEngine.run`."""

    def __init__(
        self, decoder: Decoder, scheduler: Scheduler, *, token_bytes: Items[bytes] | None
    ) -> None:
        self.version = 0
        """Of the weights; recorded with every token."""
        self._decoder = decoder
        self._scheduler = scheduler
        self._token_bytes = token_bytes
        self._sequences: dict[int, Sequence] = {}
        self._ended: list[Sequence] = []
        self._next_ticket = 0
        self._stats = RolloutStats()

    @property
    def stats(self) -> RolloutStats:
        """What has been done so far."""
        return replace(self._stats, positions_shared=self._scheduler.positions_shared)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._decoder.vocab_size

    @property
    def num_unfinished(self) -> int:
        """Sequences that are being sampled or wait for it."""
        return sum(s.is_running for s in self._sequences.values())

    def submit(self, request: Request, *, keep: bool = False) -> int:
        """Queue a request; returns its ticket.

        keep: the sequence can be continued after it has stopped, until `release`.
        """
        return self.submit_all([request], keep=keep)[0]

    def submit_all(self, requests: Items[Request], *, keep: bool = False) -> list[int]:
        """Queue requests; returns their tickets.

        Raises:
            ValueError: some cannot be sampled; all of them are named, and none is queued.
        """
        wrong = [
            f"request {index}: {problem}."
            for index, request in enumerate(requests)
            for problem in [*request.problems(), *self._misfits(request)]
        ]
        if wrong:
            raise ValueError("\n  ".join(["cannot sample:", *wrong]))
        tickets = []
        for request in requests:
            stops = StopMatcher(
                stop_ids=request.stop_ids,
                stop_strings=request.stop_strings,
                token_bytes=self._token_bytes,
            )
            sequence = Sequence(request, ticket=self._next_ticket, stops=stops, is_kept=keep)
            self._next_ticket += 1
            self._sequences[sequence.ticket] = sequence
            self._start(sequence)
            tickets.append(sequence.ticket)
        return tickets

    def extend(self, ticket: int, token_ids: Items[int], *, max_new_tokens: int) -> None:
        """Append tokens to a kept sequence that has stopped and sample its next turn.

        The context keeps its exact ids, and its cache if the slot was not needed meanwhile.  If the
        context is full, the turn's completion is empty, with the stop reason "context".
        """
        sequence = self._kept(ticket)
        if sequence.is_running:
            raise ValueError(f"ticket {ticket} is still being sampled: extend it after its turn.")
        outside = [token for token in token_ids if not 0 <= token < self._decoder.vocab_size]
        if outside:
            raise ValueError(
                f"ticket {ticket}: tokens {outside[:5]} are not in the vocabulary of "
                f"{self._decoder.vocab_size}."
            )
        sequence.context += token_ids
        sequence.begin_turn(max_new_tokens)
        self._start(sequence)

    def context(self, ticket: int) -> tuple[int, ...]:
        """All token ids of a kept or running sequence: prompt, sampled and appended ones."""
        return tuple(self._kept(ticket).context)

    def release(self, ticket: int) -> None:
        """Forget a sequence, whether it has stopped or not."""
        sequence = self._kept(ticket)
        sequence.is_kept = sequence.is_running = False
        self._scheduler.stop(sequence)
        del self._sequences[ticket]
        self._ended = [s for s in self._ended if s is not sequence]

    def step(self) -> list[Completion]:
        """Compute one step for all running sequences; the turns that ended with it."""
        if not self._ended and self._scheduler.has_work:
            self._decoder.is_any_working(True)
            self._step()
        ended, self._ended = self._ended, []
        return [self._end(sequence) for sequence in ended]

    def follow_other_replicas(self) -> None:
        """Take part in the steps of replicas that share experts with this one till all are done."""
        while self._decoder.is_any_working(False):
            self._decoder.forward(
                StepPlan(
                    tokens=[0],
                    slots=[0],
                    positions=[0],
                    num_running=1,
                    wanted=[],
                    num_slots=max(1, self._scheduler.table.num_slots),
                    capacity=max(1, self._scheduler.table.capacity),
                )
            )

    def _misfits(self, request: Request) -> list[str]:
        """Why the model cannot take a request."""
        vocab_size, max_context = self._decoder.vocab_size, self._decoder.max_context
        wrong = []
        if len(request.prompt_ids) >= max_context:
            wrong.append(
                f"the prompt of {len(request.prompt_ids)} tokens leaves no room in the model's "
                f"context of {max_context}: shorten it, or raise --max-position-embeddings"
            )
        outside = [token for token in request.prompt_ids if not 0 <= token < vocab_size]
        if outside:
            wrong.append(f"tokens {outside[:5]} are not in the vocabulary of {vocab_size}")
        return wrong

    def _kept(self, ticket: int) -> Sequence:
        if ticket not in self._sequences:
            raise ValueError(
                f"ticket {ticket} is not known: it was released, or stopped and was not kept."
            )
        return self._sequences[ticket]

    def _start(self, sequence: Sequence) -> None:
        """Queue a sequence, or end its turn where there is nothing to sample."""
        if len(sequence.context) >= min(sequence.budget, self._decoder.max_context):
            sequence.is_running = False
            self._ended.append(sequence)
        else:
            self._scheduler.add(sequence)

    def _end(self, sequence: Sequence) -> Completion:
        self._scheduler.stop(sequence)
        if not sequence.is_kept:
            del self._sequences[sequence.ticket]
        return sequence.completion()

    def _step(self) -> None:
        plan, draws = self._scheduler.plan()
        started = time.perf_counter()
        logits_NV = self._decoder.forward(plan)
        computed = time.perf_counter()
        if len(draws) != len(plan.wanted):
            logits_NV = logits_NV[[row for _, row in draws]]
        requests = [sequence.request for sequence, _ in draws]
        wants_top = any(request.top_logprobs for request in requests)
        drawn = draw(
            logits_NV,
            params=[request.sampling for request in requests],
            uniforms=[s.stream.at(len(s.context)) for s, _ in draws],
            num_top=[request.top_logprobs for request in requests] if wants_top else (),
        )
        self._scheduler.finish()
        for row, (sequence, _) in enumerate(draws):
            if wants_top:
                sequence.top.append(tuple(drawn.top[row]))
            if sequence.append(
                drawn.tokens[row],
                drawn.logprobs[row],
                version=self.version,
                max_context=self._decoder.max_context,
            ):
                self._ended.append(sequence)
        self._count(plan, draws, model=computed - started, sampling=time.perf_counter() - computed)

    def _count(
        self,
        plan: StepPlan,
        draws: list[tuple[Sequence, int]],
        *,
        model: float,
        sampling: float,
    ) -> None:
        now = self._stats
        self._stats = RolloutStats(
            steps=now.steps + 1,
            sampled_tokens=now.sampled_tokens + len(draws),
            positions=now.positions + len(plan.tokens),
            positions_without_cache=now.positions_without_cache
            + sum(len(sequence.context) - 1 for sequence, _ in draws),
            model_seconds=now.model_seconds + model,
            sampling_seconds=now.sampling_seconds + sampling,
        )
