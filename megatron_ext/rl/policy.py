"""What the loop needs of the model that learns, whoever computes it.

Every call is collective: all ranks of the job make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_ext.packing.types import Microbatch
from megatron_ext.rl.objective import PolicyObjective
from megatron_ext.rollout.engine import RolloutEngine


@dataclass(frozen=True, kw_only=True)
class Update:
    """What one parameter update computed and did, the same on every rank."""

    loss: float
    statistics: Mapping[str, float]
    """Of the objective: means over the trained tokens of the whole update."""
    num_trained: int
    """Trained tokens, over the whole job."""
    num_positions: int
    """Positions computed, padding included, over the whole job."""
    grad_norm: float
    learning_rate: float
    skipped: bool
    """The optimizer refused the gradients (overflow in fp16)."""
    pipeline_sent_bytes: int = 0
    """Sent between pipeline stages, all stages and replicas of one tensor-parallel rank."""


class Policy(Protocol):
    """A model that samples, computes log-probs and is updated."""

    @property
    def engine(self) -> RolloutEngine:
        """Samples with the present weights, on this replica."""
        ...

    @property
    def dp_size(self) -> int:
        """Replicas that roll out different prompts."""
        ...

    @property
    def dp_rank(self) -> int:
        """Which replica this rank belongs to."""
        ...

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes the run's files."""
        ...

    def gather[Item](self, mine: Sequence[Item]) -> list[Item]:
        """The items of all replicas, in their order."""
        ...

    def logprobs(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Log-probs [B, S] of each microbatch's labels where it has weights, under the present
        weights; on ranks without the output layer none."""
        ...

    def reference_logprobs(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """The same under the reference policy: the weights the run began with."""
        ...

    def total(self, values: Tensor) -> Tensor:
        """Sum over the replicas of values of the ranks with the output layer, on every rank."""
        ...

    def train(
        self, microbatches: Sequence[Microbatch], objective: PolicyObjective, *, num_samples: int
    ) -> Update:
        """One update; the learning-rate schedule moves on by so many samples."""
        ...

    def skip(self, *, num_samples: int) -> None:
        """No update, as there is nothing to train; only the schedule moves on."""
        ...
