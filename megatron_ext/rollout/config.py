"""What can be chosen about rollouts.

No `from __future__ import annotations`: Megatron's ArgumentGroupFactory needs the field types
themselves.
"""

from dataclasses import dataclass

from megatron_ext.options.ranges import Ranged, ranged
from megatron_ext.rollout.types import SamplingParams


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Ranged):
    """Sampling of episodes and the engine that decodes them."""

    rollout_temperature: float = ranged(1.0, above=0, at_most=1e6, also=(0,))
    """Temperature of sampling; the trainer's log-probabilities use the same. 0 = greedy, for
    evaluation only."""
    rollout_top_k: int = ranged(0, at_least=0, note="0 = all tokens")
    """Sample from the k most likely tokens only, for evaluation only. 0 = all."""
    rollout_top_p: float = ranged(1.0, above=0, at_most=1)
    """Sample from the fewest tokens that have this probability, for evaluation only. 1 = all."""
    rollout_min_p: float = ranged(0.0, at_least=0, at_most=1)
    """Sample from tokens with at least this share of the most likely token's probability, for
    evaluation only. 0 = all."""
    rollout_max_new_tokens: int = ranged(256, at_least=1)
    """Sampled tokens of an episode at most, all turns together."""
    rollout_slots: int = ranged(32, at_least=1)
    """Requests that one model replica decodes at a time; a finished one's slot is refilled at
    once."""
    rollout_prefill_tokens: int = ranged(512, at_least=1)
    """Prompt tokens computed in one step at most, beside one token of every running request;
    longer prompts go in pieces."""
    rollout_cache_tokens: int = ranged(0, at_least=0, note="0 = as many as needed")
    """Positions the KV cache of one replica may hold, over all slots; requests wait, or are
    computed again later, when it is full. 0 = as many as the slots need."""
    rollout_share_prefill: bool = True
    """Compute a prompt that several requests begin with once and copy its cache."""

    @property
    def sampling(self) -> SamplingParams:
        """The distribution that the options describe."""
        return SamplingParams(
            temperature=self.rollout_temperature,
            top_k=self.rollout_top_k,
            top_p=self.rollout_top_p,
            min_p=self.rollout_min_p,
        )
