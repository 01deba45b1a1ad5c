"""What can be chosen about rollouts.

No `from __future__ import annotations`: Megatron's ArgumentGroupFactory needs the field types
themselves.
"""

from dataclasses import dataclass

from megatron_ext.rollout.types import SamplingParams


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Sampling of episodes and the engine that decodes them."""

    rollout_temperature: float = 1.0
    """Temperature of sampling; the trainer's log-probabilities use the same. 0 = greedy, for
    evaluation only."""
    rollout_top_k: int = 0
    """Sample from the k most likely tokens only, for evaluation only. 0 = all."""
    rollout_top_p: float = 1.0
    """Sample from the fewest tokens that have this probability, for evaluation only. 1 = all."""
    rollout_min_p: float = 0.0
    """Sample from tokens with at least this share of the most likely token's probability, for
    evaluation only. 0 = all."""
    rollout_max_new_tokens: int = 256
    """Sampled tokens of an episode at most, all turns together."""
    rollout_slots: int = 32
    """Requests that one model replica decodes at a time; a finished one's slot is refilled at
    once."""
    rollout_prefill_tokens: int = 512
    """Prompt tokens computed in one step at most, beside one token of every running request;
    longer prompts go in pieces."""
    rollout_cache_tokens: int = 0
    """Positions the KV cache of one replica may hold, over all slots; requests wait, or are
    computed again later, when it is full. 0 = as many as the slots need."""
    rollout_share_prefill: bool = True
    """Compute a prompt that several requests begin with once and copy its cache."""

    def __post_init__(self) -> None:
        """Raise `ValueError` with all that is wrong."""
        wrong = self.problems()
        if wrong:
            raise ValueError(" ".join(wrong))

    def problems(self) -> list[str]:
        """What is wrong with the values, one sentence each."""
        wrong = []
        if not self.rollout_temperature >= 0:
            wrong.append(f"--rollout-temperature {self.rollout_temperature} must be 0 or more.")
        if self.rollout_top_k < 0:
            wrong.append(f"--rollout-top-k {self.rollout_top_k} is negative: use 0 for all tokens.")
        if not 0 < self.rollout_top_p <= 1:
            wrong.append(f"--rollout-top-p {self.rollout_top_p} must be above 0 and at most 1.")
        if not 0 <= self.rollout_min_p <= 1:
            wrong.append(f"--rollout-min-p {self.rollout_min_p} must be from 0 to 1.")
        for name in ("max_new_tokens", "slots", "prefill_tokens"):
            value = getattr(self, f"rollout_{name}")
            if value < 1:
                wrong.append(f"--rollout-{name.replace('_', '-')} {value} must be at least 1.")
        if self.rollout_cache_tokens < 0:
            wrong.append(
                f"--rollout-cache-tokens {self.rollout_cache_tokens} is negative: give a number of "
                "positions, or 0 for as many as the slots need."
            )
        return wrong

    @property
    def sampling(self) -> SamplingParams:
        """The distribution that the options describe."""
        return SamplingParams(
            temperature=self.rollout_temperature,
            top_k=self.rollout_top_k,
            top_p=self.rollout_top_p,
            min_p=self.rollout_min_p,
        )
