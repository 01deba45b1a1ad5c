"""The objective of an algorithm: from the log-probs of a microbatch to per-token loss terms.

Everything at untrained positions is replaced before the first formula, so whatever stands there,
NaN included, changes neither values nor gradients.  Weighting, masking and the sum belong to the
loss law (`packing/weights.py`), for losses and statistics alike.
Invariants the tests check: loss and gradient of every preset equal plain Python over each episode
alone, for any packing; at untrained positions the gradient is exactly 0; a microbatch without a
trained position has a graph.

Legend: B rows, S positions of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_ext.packing.types import Microbatch
from megatron_ext.rl import losses
from megatron_ext.rl.config import AlgorithmConfig
from megatron_ext.rl.kl import kl_estimate
from megatron_ext.rl.ratios import log_ratio, sampler_weight, sequence_ids, sequence_log_ratio
from megatron_ext.rl.types import (
    ADVANTAGES,
    OLD_LOGPROBS,
    REFERENCE_LOGPROBS,
    SAMPLER_LOGPROBS,
    LossTerms,
)


@dataclass(frozen=True, kw_only=True)
class PolicyObjective:
    """What `Stepper.forward_backward` calls for each microbatch of an update."""

    config: AlgorithmConfig
    updates_per_batch: int = 1
    """Updates on one rollout batch, over all epochs and minibatches."""

    @property
    def extras(self) -> tuple[str, ...]:
        """Extras that every microbatch must carry."""
        old = self.config.needs_old_logprobs(updates_per_batch=self.updates_per_batch)
        return (
            ADVANTAGES,
            SAMPLER_LOGPROBS,
            *([OLD_LOGPROBS] if old else []),
            *([REFERENCE_LOGPROBS] if self.config.has_kl_loss else []),
        )

    @property
    def needs_entropy(self) -> bool:
        """Whether the entropy of each position has to be computed, with its gradient."""
        return self.config.entropy_coefficient != 0

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the statistics of each call, in order; the same on every rank."""
        config = self.config
        clips = [f"clip_fraction_{side}" for side in ("low", "high")]
        dual = ["clip_fraction_dual"] if config.dual_clip else []
        return (
            "ratio",
            "ratio_squared",
            "ratio_deviation",
            "kl_old",
            "sampler_gap",
            "sampler_kl",
            "entropy_estimate",
            *(clips + dual if config.policy_loss in ("clip", "cispo") else []),
            *(["sampler_weight", "sampler_weight_capped"] if config.sampler_correction_cap else []),
            *(["kl_reference"] if config.has_kl_loss else []),
            *(["entropy"] if self.needs_entropy else []),
        )

    def __call__(
        self, logprobs_BS: Tensor, microbatch: Microbatch, *, entropy_BS: Tensor | None = None
    ) -> LossTerms:
        """Loss terms from the log-probs (and entropies, if needed) of the labels, each [B, S]."""
        missing = [name for name in self.extras if name not in microbatch.extras]
        assert not missing, f"the microbatch lacks {', '.join(missing)}"
        tokens = self._tokens(logprobs_BS, microbatch)
        loss_BS, statistics = self._policy(tokens)
        statistics |= _drift(tokens)
        if self.config.has_kl_loss:
            assert tokens.reference_logp is not None, "checked with the extras"
            kl_BS = kl_estimate(
                tokens.logp, tokens.reference_logp, estimator=self.config.kl_estimator
            )
            loss_BS = loss_BS + self.config.kl_coefficient * kl_BS
            statistics["kl_reference"] = kl_BS
        if self.needs_entropy:
            assert entropy_BS is not None, "--entropy-coefficient needs the entropies"
            entropy_BS = torch.where(tokens.is_trained, entropy_BS, 0)
            loss_BS = loss_BS - self.config.entropy_coefficient * entropy_BS
            statistics["entropy"] = entropy_BS
        return LossTerms(
            losses_BS=loss_BS,
            statistics={name: statistics[name].detach() for name in self.statistics},
        )

    def _tokens(self, logprobs_BS: Tensor, microbatch: Microbatch) -> _Tokens:
        """The inputs of the formulas, 0 wherever nothing is trained."""
        config, extras = self.config, microbatch.extras
        is_trained = microbatch.weights_BS != 0
        logp = torch.where(is_trained, logprobs_BS, 0)

        def kept(name: str) -> Tensor:
            return torch.where(is_trained, extras[name], 0)

        if config.needs_old_logprobs(updates_per_batch=self.updates_per_batch):
            old_logp = kept(OLD_LOGPROBS)
        elif config.old_policy == "sampler" and config.policy_loss != "likelihood":
            old_logp = kept(SAMPLER_LOGPROBS)
        else:  # of the only update, or of a loss that has no ratio
            old_logp = logp.detach()
        ratio_of = log_ratio
        if config.ratio_level == "sequence":
            ids = sequence_ids(microbatch)
            ratio_of = partial(sequence_log_ratio, trained_T=is_trained, sequence_T=ids)
        sampler_logp = kept(SAMPLER_LOGPROBS)
        return _Tokens(
            is_trained=is_trained,
            logp=logp,
            old_logp=old_logp,
            trainer_logp=logp.detach() if config.old_policy == "sampler" else old_logp,
            sampler_logp=sampler_logp,
            reference_logp=kept(REFERENCE_LOGPROBS) if config.has_kl_loss else None,
            advantage=kept(ADVANTAGES),
            log_ratio=ratio_of(logp, old_logp),
            sampler_log_ratio=ratio_of(old_logp, sampler_logp),
        )

    def _policy(self, tokens: _Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """The policy term of each token, and what clipping and correcting did."""
        config, advantage = self.config, tokens.advantage
        ratio = tokens.log_ratio.exp()
        clip = {"clip_low": config.clip_low, "clip_high": config.clip_high}
        statistics: dict[str, Tensor] = {}
        match config.policy_loss:
            case "likelihood":
                loss = losses.likelihood_loss(tokens.logp, advantage_T=advantage)
            case "importance":
                loss = losses.importance_loss(ratio, advantage_T=advantage)
            case "clip":
                clip["dual_clip"] = config.dual_clip
                loss = losses.clipped_loss(ratio, advantage_T=advantage, **clip)
                statistics |= losses.clip_fractions(ratio, advantage_T=advantage, **clip)
            case "cispo":
                loss = losses.cispo_loss(tokens.logp, ratio, advantage_T=advantage, **clip)
                statistics |= losses.weight_clip_fractions(ratio, **clip)
        if config.sampler_correction_cap:
            cap = config.sampler_correction_cap
            weight = sampler_weight(tokens.sampler_log_ratio, cap=cap)
            loss = loss * weight
            statistics["sampler_weight"] = weight
            statistics["sampler_weight_capped"] = (weight >= cap).to(weight.dtype)
        return loss, statistics


@dataclass(frozen=True, kw_only=True)
class _Tokens:
    """Inputs of the formulas, each [B, S]."""

    is_trained: Tensor
    logp: Tensor
    old_logp: Tensor
    trainer_logp: Tensor
    """The trainer's own nearest to the sampling: what to compare the sampler with."""
    sampler_logp: Tensor
    reference_logp: Tensor | None
    advantage: Tensor
    log_ratio: Tensor
    """To the old policy: of the token, or of its sequence (--ratio-level)."""
    sampler_log_ratio: Tensor
    """The same from the old policy to the sampler."""


def _drift(tokens: _Tokens) -> dict[str, Tensor]:
    """How far the policy is from the old one, and the trainer from the sampler.

    KL estimates are k3 from the other policy's samples: r - 1 - log r.
    """
    log_r = tokens.log_ratio.detach()
    gap = log_ratio(tokens.trainer_logp, tokens.sampler_logp)
    ratio = log_r.exp()
    return {
        "ratio": ratio,
        "ratio_squared": ratio.square(),
        "ratio_deviation": (ratio - 1).abs(),
        "kl_old": torch.expm1(log_r) - log_r,
        "sampler_gap": gap.abs(),
        "sampler_kl": torch.expm1(gap) - gap,
        "entropy_estimate": -tokens.logp,
    }
