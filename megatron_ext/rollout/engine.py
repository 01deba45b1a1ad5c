"""The rollout engine: requests in, exact sampled tokens out.

    engine = RolloutEngine(decoder, config)
    completions = engine.generate(requests, version=step)

or, for environments with many episodes at once,

    def play(session):                       # runs on one rank of the replica, the others follow
        ticket = session.submit(request, keep=True)
        for completion in session.step(): ...
        session.extend(ticket, reply_ids, max_new_tokens=20)
    result = engine.run(play, version=step)  # the result, on every rank of the replica

Between two calls of `run` the weights may change: caches are dropped, tokens are kept, sequences
go on where they were, and every token knows the version it was sampled by.
Invariants the tests check: cached = recomputed, batched = one by one, shared prefill = separate.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Protocol

from torch import Tensor

from megatron_ext.rollout.config import RolloutConfig
from megatron_ext.rollout.scheduler import Scheduler
from megatron_ext.rollout.session import RolloutSession
from megatron_ext.rollout.slot_table import SlotTable
from megatron_ext.rollout.step_plan import StepPlan
from megatron_ext.rollout.types import Completion, Request


class Decoder(Protocol):
    """A model that carries out step plans with a cache of its own, perhaps over several ranks."""

    vocab_size: int
    max_context: int

    def forward(self, plan: StepPlan) -> Tensor:
        """Logits [wanted tokens, vocabulary] in at least fp32, which may be overwritten."""
        ...

    def run[Result](self, drive: Callable[[], Result]) -> Result:
        """Call `drive` on one rank while the others carry out its plans; its result, on all ranks.

        Starts and ends without cache.  Weights must not change meanwhile.
        """
        ...

    def is_any_working(self, is_working: bool) -> bool:
        """Whether any replica that must step together with this one has work; True if it has."""
        ...


class RolloutEngine:
    """Samples completions from a model replica.  All its ranks make the same calls."""

    def __init__(
        self,
        decoder: Decoder,
        config: RolloutConfig | None = None,
        *,
        token_bytes: Items[bytes] | None = None,
    ) -> None:
        """An engine without requests.

        token_bytes: what each token contributes to the text (token_bytes.py), for stop strings.
        """
        config = config or RolloutConfig()
        table = SlotTable(
            max_slots=config.rollout_slots,
            max_context=decoder.max_context,
            max_positions=config.rollout_cache_tokens,
        )
        self.decoder = decoder
        self.scheduler = Scheduler(
            table,
            prefill_tokens=config.rollout_prefill_tokens,
            share_prefill=config.rollout_share_prefill,
        )
        self.session = RolloutSession(decoder, self.scheduler, token_bytes=token_bytes)

    def run[Result](self, drive: Callable[[RolloutSession], Result], *, version: int = 0) -> Result:
        """Let `drive` sample with the present weights; its result, on every rank of the replica.

        drive: called on one rank only; what it returns must be picklable if there are more.
        version: recorded with every token that is sampled.
        """
        self.session.version = version

        def driven() -> Result:
            self.scheduler.drop_caches()
            try:
                return drive(self.session)
            finally:
                self.session.follow_other_replicas()

        return self.decoder.run(driven)

    def generate(
        self,
        requests: Items[Request],
        *,
        version: int = 0,
        on_completion: Callable[[Completion], object] | None = None,
    ) -> list[Completion]:
        """Completions of all requests, in their order.

        on_completion: told of each as it ends, on one rank of the replica.
        """

        def drive(session: RolloutSession) -> list[Completion]:
            if session.num_unfinished:
                raise ValueError(
                    f"the engine has {session.num_unfinished} unfinished sequences: end or release "
                    "them with run() before generate()."
                )
            tickets = session.submit_all(requests)
            found: dict[int, Completion] = {}
            try:
                while len(found) < len(tickets):
                    ended = session.step()
                    found |= {completion.ticket: completion for completion in ended}
                    if on_completion is not None:
                        for completion in ended:
                            on_completion(completion)
            finally:
                for ticket in set(tickets) - found.keys():
                    session.release(ticket)
            return [found[ticket] for ticket in tickets]

        return self.run(drive, version=version)
