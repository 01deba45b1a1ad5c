"""One sequence being sampled: its token ids, what of it is cached, and what was drawn so far."""

from __future__ import annotations

from collections.abc import Sequence as Items

from megatron_ext.rollout.stops import StopMatcher
from megatron_ext.rollout.types import Completion, Request, StopReason
from megatron_ext.rollout.uniforms import UniformStream


class Sequence:
    """The state of a request; tokens once in `context` never change."""

    __slots__ = (
        "_turn",
        "budget",
        "cached",
        "context",
        "is_kept",
        "is_running",
        "leader",
        "logprobs",
        "request",
        "slot",
        "stops",
        "stream",
        "ticket",
        "top",
        "versions",
    )

    def __init__(self, request: Request, *, ticket: int, stops: StopMatcher, is_kept: bool) -> None:
        self.request = request
        self.ticket = ticket
        self.context = list(request.prompt_ids)
        self.is_kept = is_kept
        """Whether it stays after it has stopped, to be continued."""
        self.stops = stops
        self.stream = UniformStream(seed=request.seed, sample=request.sample)
        self.slot = -1
        """Slot of the cache; -1 = none."""
        self.cached = 0
        """So many first tokens of the context are in the slot."""
        self.leader: tuple[Sequence, int] | None = None
        """A sequence that is computing the same prompt, and how much of it to copy from there."""
        self.begin_turn(request.max_new_tokens)

    def begin_turn(self, max_new_tokens: int) -> None:
        """Sample from here on, at most so many tokens."""
        self._turn = len(self.context)
        self.budget = len(self.context) + max_new_tokens
        """Length of the context at which the turn ends."""
        self.is_running = True
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.top: list[tuple[tuple[int, float], ...]] = []
        self.stops.reset()

    @property
    def pending(self) -> int:
        """Tokens of the context that are not in the cache; the next draw needs all of them."""
        return len(self.context) - self.cached

    def append(self, token: int, logprob: float, *, version: int, max_context: int) -> bool:
        """Take a drawn token; whether the turn ended with it."""
        self.context.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if self.stops.met(token) or len(self.context) >= min(self.budget, max_context):
            self.is_running = False
        return not self.is_running

    def completion(self) -> Completion:
        """What the turn gave."""
        return Completion(
            ticket=self.ticket,
            token_ids=tuple(self.context[self._turn :]),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            stop_reason=self._stop_reason(),
            stopped_by=self.stops.matched,
            first_position=self._turn,
            top_logprobs=tuple(self.top),
        )

    def _stop_reason(self) -> StopReason:
        if self.stops.matched is not None:
            return "stop"
        return "length" if len(self.context) >= self.budget else "context"

    def forget_cache(self) -> None:
        """It has no slot any more."""
        self.slot, self.cached, self.leader = -1, 0, None


def common_length(a: Items[int], b: Items[int]) -> int:
    """Number of first items that both have in common."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
