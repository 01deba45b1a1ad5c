"""Whether the sampler and the trainer say the same of the same tokens.

They must: the ratio of a policy gradient is 1 before the first update only if they do.  Both
compute softmax(logits / temperature); what remains is rounding (1e-6 in fp32), which is measured in
every run.  A cut distribution (top-k, top-p, min-p) cannot agree and is refused for training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.rollout.types import SamplingParams


@dataclass(frozen=True, kw_only=True)
class LogprobGap:
    """Trainer's minus sampler's log-probability, over some tokens."""

    num_tokens: int = 0
    sum_abs: float = 0.0
    sum_kl: float = 0.0
    largest: float = 0.0

    @classmethod
    def of(cls, sampler_T: Tensor, trainer_T: Tensor, *, sampled_T: Tensor) -> LogprobGap:
        """The gap where `sampled_T` [T] is True; the KL is of the sampler to the trainer."""
        gap_N = (trainer_T - sampler_T)[sampled_T].double()
        if not len(gap_N):
            return cls()
        return cls(
            num_tokens=len(gap_N),
            sum_abs=float(gap_N.abs().sum()),
            sum_kl=float((torch.expm1(gap_N) - gap_N).sum()),
            largest=float(gap_N.abs().max()),
        )

    @classmethod
    def merged(cls, parts: Sequence[LogprobGap]) -> LogprobGap:
        """The gap over the tokens of all parts."""
        return cls(
            num_tokens=sum(part.num_tokens for part in parts),
            sum_abs=sum(part.sum_abs for part in parts),
            sum_kl=sum(part.sum_kl for part in parts),
            largest=max((part.largest for part in parts), default=0.0),
        )

    def metrics(self) -> dict[str, float]:
        """What a run reports, in nats."""
        count = max(self.num_tokens, 1)
        return {
            "logprob_gap_mean": self.sum_abs / count,
            "logprob_gap_max": self.largest,
            "logprob_gap_kl": self.sum_kl / count,
        }


def training_problems(params: SamplingParams) -> list[str]:
    """Why tokens drawn with these parameters cannot be trained on, one sentence each."""
    wrong = []
    for name, value, off in (
        ("top-k", params.top_k, 0),
        ("top-p", params.top_p, 1.0),
        ("min-p", params.min_p, 0.0),
    ):
        if value != off:
            wrong.append(
                f"--rollout-{name} {value}: the sampler would draw from the likely tokens only, "
                "while the trainer's softmax has all of them, so every ratio would be wrong by the "
                f"probability that was cut off. Use {off} for training."
            )
    if params.is_greedy:
        wrong.append(
            "--rollout-temperature 0: all samples of a prompt would be the same, and there would "
            "be nothing to learn from. Use 1."
        )
    return wrong
