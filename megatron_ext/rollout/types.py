"""What goes into a rollout and what comes out: requests, how to sample them, completions.

Token ids are exact in both directions: a completion has the ids that were sampled, all of them,
and a longer conversation is the same ids with more appended.  Nothing is decoded and encoded again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

StopReason = Literal["stop", "length", "context"]
"""A stop id or stop string; the request's budget is used up; the model's context is full."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The distribution that tokens are drawn from: softmax(logits / temperature), then cut.

    The cuts apply in this order, each to what the one before left, tokens that tie with the last
    one kept are kept too; then the rest is normalised again.

    Raises:
        ValueError: some value is out of its range; all of them are named.
    """

    temperature: float = 1.0
    """0 = greedy: the most likely token; its log-probability is then that at temperature 1."""
    top_k: int = 0
    """Keep the k most likely tokens.  0 = all."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens that have at least this probability.  1 = all."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the most likely token's probability.  0 = all."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        wrong = self.problems()
        if wrong:
            raise ValueError("sampling parameters: " + "; ".join(wrong) + ".")

    def problems(self) -> list[str]:
        """What is out of range, one sentence each."""
        wrong = []
        if not 0 <= self.temperature < float("inf"):
            wrong.append(f"temperature {self.temperature} must be 0 (greedy) or more")
        if self.top_k < 0:
            wrong.append(f"top_k {self.top_k} must be a number of tokens, or 0 for all")
        if not 0 < self.top_p <= 1:
            wrong.append(f"top_p {self.top_p} must be above 0 and at most 1 (1 = all)")
        if not 0 <= self.min_p <= 1:
            wrong.append(f"min_p {self.min_p} must be from 0 (all) to 1")
        return wrong

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0

    @property
    def is_cut(self) -> bool:
        """Whether some tokens can never be drawn."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sequence to sample."""

    prompt_ids: tuple[int, ...]
    """The context so far, at least one token."""
    max_new_tokens: int
    """Budget of sampled tokens; tokens sampled before an interruption count."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    """With `sample` and the token's place in the context it determines each draw, and nothing else
    does: not the other requests, not the parallel layout.  At least 0, below 2**64."""
    sample: int = 0
    """Which of several samples of one prompt this is; same prompt and seed, other `sample`: other
    tokens."""
    stop_ids: frozenset[int] = frozenset()
    """Sampling ends with any of these tokens; it is the completion's last token."""
    stop_strings: tuple[str, ...] = ()
    """Sampling ends with the token whose text completes one of these; needs `token_bytes`."""
    top_logprobs: int = 0
    """Also report this many most likely tokens of each draw.  0 = none."""

    def problems(self) -> list[str]:
        """What is wrong with the request by itself, one sentence each."""
        wrong = []
        if not self.prompt_ids:
            wrong.append("the prompt has no token: start it with a BOS token")
        if self.max_new_tokens < 0:
            wrong.append(f"max_new_tokens {self.max_new_tokens} is negative")
        if not (0 <= self.seed < 2**64 and 0 <= self.sample < 2**64):
            wrong.append(f"seed {self.seed} and sample {self.sample} must be from 0 to 2**64 - 1")
        if "" in self.stop_strings:
            wrong.append("an empty stop string would end every completion at once")
        if self.top_logprobs < 0:
            wrong.append(f"top_logprobs {self.top_logprobs} is negative")
        return wrong


def samples_of(request: Request, count: int) -> list[Request]:
    """`count` requests for different samples of one prompt, numbered from the request's own."""
    return [replace(request, sample=request.sample + i) for i in range(count)]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What was sampled for one request, or for one turn of it."""

    ticket: int
    """The request's number in its engine."""
    token_ids: tuple[int, ...]
    """Every sampled token, those of the stop included.  Empty if there was no room or budget."""
    logprobs: tuple[float, ...]
    """Log-probability of each token under the distribution it was drawn from, in nats."""
    versions: tuple[int, ...]
    """Version of the weights that each token was sampled by."""
    stop_reason: StopReason
    stopped_by: int | str | None = None
    """The stop id or stop string, if one was met."""
    first_position: int = 0
    """Place of the first sampled token in the context."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """For each token the most likely (token, log-probability) pairs, if asked for."""
