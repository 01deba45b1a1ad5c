"""Which algorithm trains the policy, and every choice it is made of; each field becomes a flag.

`--algorithm` names a row of `presets.py`, which sets the other options; a flag of the user wins.
No `from __future__ import annotations`: Megatron's ArgumentGroupFactory needs the field types
themselves.
"""

from dataclasses import dataclass, fields
from math import isnan
from typing import Literal

from megatron_ext.options.ranges import Ranged, ranged
from megatron_ext.packing.config import LossNormalization

Algorithm = Literal[
    "sft",
    "reinforce",
    "rloo",
    "grpo",
    "grpo-plus",
    "grpo-tis",
    "dapo",
    "dr-grpo",
    "ppo",
    "decoupled-ppo",
    "importance-sampling",
    "gspo",
    "cispo",
]
PolicyLoss = Literal["likelihood", "importance", "clip", "cispo"]
Baseline = Literal["none", "group-mean", "leave-one-out"]
AdvantageNormalization = Literal["none", "group-std", "batch"]
KlEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(Ranged):
    """The algorithm of a run; --algorithm sets the rest, and a flag given beside it wins."""

    algorithm: Algorithm = "sft"
    """What trains the policy: sft = supervised, the log-likelihood of the trained tokens of
    --train-data; the others are reinforcement learning and set the options below and
    --loss-normalization."""

    policy_loss: PolicyLoss = "clip"
    """Loss of a token with advantage A and ratio r = p / p_old: likelihood = -A log p (REINFORCE),
    importance = -A r, clip = PPO's clipped surrogate, cispo = REINFORCE times the clipped ratio."""

    ratio_level: Literal["token", "sequence"] = "token"
    """What a ratio belongs to: each token, or its whole sequence (GSPO, the geometric mean over its
    trained tokens)."""

    old_policy: Literal["trainer", "sampler"] = "trainer"
    """Whose log-probs p_old are: the trainer's before the first update of a rollout batch (computed
    again only where there are several updates), or those the sampler recorded."""

    clip_low: float = ranged(0.2, at_least=0, at_most=1, note="1 = no lower bound")
    """Ratios count down to 1 - this; 1 = no lower bound."""

    clip_high: float = ranged(0.2, at_least=0, with_infinity=True, note="inf = no upper bound")
    """Ratios count up to 1 + this; inf = no upper bound."""

    dual_clip: float = ranged(0.0, above=1, also=(0,), note="3 is usual, 0 = no limit")
    """Most loss of a token, as a multiple of its negative advantage; 0 = no limit."""

    sampler_correction_cap: float = ranged(0.0, at_least=0, with_infinity=True, note="0 = off")
    """Weigh each token's policy loss by p_old / p_sampler, at most this: 2 = truncated importance
    sampling, inf = decoupled PPO. With --ratio-level sequence that is one ratio for a sequence,
    too. 0 = off."""

    advantage_baseline: Baseline = "group-mean"
    """What is subtracted from an episode's reward: nothing, the mean of its group (the episodes of
    one prompt), or the mean of the others in its group (RLOO)."""

    advantage_normalization: AdvantageNormalization = "none"
    """How advantages are scaled: not at all, by the standard deviation of their group's rewards, or
    to mean 0 and standard deviation 1 over the trained tokens of the whole global batch."""

    kl_coefficient: float = ranged(0.0, at_least=0, at_most=1e6, note="0 = off")
    """Weight of the KL divergence to the reference policy, per nat; 0 = off, and no reference."""

    kl_estimator: KlEstimator = "k3"
    """Per-token estimate with d = log p_reference - log p: k1 = -d, k2 = d^2 / 2,
    k3 = exp(d) - 1 - d."""

    kl_placement: Literal["loss", "reward"] = "loss"
    """Where the KL term goes: added to each token's loss, or its sum over an episode subtracted
    from the reward, before the baseline."""

    entropy_coefficient: float = ranged(0.0, at_least=0, at_most=1e6, note="0 = off")
    """Weight of the entropy bonus, per nat and token; 0 = off."""

    overlong_episodes: Literal["train", "mask"] = "train"
    """Episodes cut at the length limit: trained like all, or masked (not trained, but still in the
    baseline of their group)."""

    overlong_penalty: float = ranged(0.0, at_least=1e-6, at_most=1e6, also=(0,), note="0 = off")
    """Reward lost by an episode of the longest response, growing from 0 over the last
    --overlong-penalty-window tokens (DAPO); 0 = off."""

    overlong_penalty_window: int = ranged(0, at_least=0, note="0 = a fifth of the longest")
    """Tokens before the longest response over which --overlong-penalty grows; 0 = a fifth of the
    longest response."""

    zero_variance_groups: Literal["train", "drop"] = "train"
    """Groups whose rewards are all equal before --overlong-penalty and KL are subtracted, so that
    their answers say nothing: kept (they count in the mean and feel the penalties, the KL and
    entropy terms), or left out. Both are counted in the metrics."""

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy is used at all."""
        return self.kl_coefficient != 0

    @property
    def has_kl_loss(self) -> bool:
        """Whether the loss has a KL term."""
        return self.needs_reference and self.kl_placement == "loss"

    @property
    def has_kl_reward(self) -> bool:
        """Whether the reward has a KL term: log-probs are then needed before the advantages."""
        return self.needs_reference and self.kl_placement == "reward"

    def needs_old_logprobs(self, *, updates_per_batch: int) -> bool:
        """Whether the trainer must compute log-probs before the first update of a rollout batch.

        With one update they are those of the update itself.
        """
        recomputes = self.old_policy == "trainer" and self.policy_loss != "likelihood"
        return recomputes and updates_per_batch > 1

    def penalty_window(self, *, max_response_tokens: int) -> int:
        """Tokens over which the overlong penalty grows."""
        return self.overlong_penalty_window or max(max_response_tokens // 5, 1)

    def problems(
        self,
        *,
        group_size: int = 2,
        temperature: float = 1.0,
        updates_per_batch: int = 1,
        max_response_tokens: int | None = None,
        loss_normalization: LossNormalization = "sample-mean",
        has_reference: bool = True,
    ) -> list[str]:
        """Every mismatch as one sentence with its remedy; empty when the options fit together.

        group_size: episodes of one prompt.  temperature: the sampler's.  updates_per_batch: over
        all epochs and minibatches.  has_reference: whether a reference policy can be had.
        """
        if self.algorithm == "sft":
            return self._unused_in_sft()
        found = []
        if temperature <= 0 or isnan(temperature):
            found.append(
                f"--rollout-temperature {temperature} cannot train: greedy tokens have no "
                "distribution to take log-probs from. Use a positive temperature (1 is usual); "
                "greedy is for evaluation."
            )
        found += self._advantage_problems(group_size)
        found += self._ratio_problems(updates_per_batch, loss_normalization)
        found += self._kl_problems(has_reference)
        if max_response_tokens is not None and self.overlong_penalty_window > max_response_tokens:
            found.append(
                f"--overlong-penalty-window {self.overlong_penalty_window} is longer than the "
                f"longest response of {max_response_tokens} tokens: even an empty one would pay. "
                f"Use at most {max_response_tokens}."
            )
        if self.overlong_penalty_window and not self.overlong_penalty:
            found.append("--overlong-penalty-window needs --overlong-penalty: it is 0, so off.")
        return found

    def _unused_in_sft(self) -> list[str]:
        changed = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in changed)
        return [f"{flags}: --algorithm sft does not use it. Drop it."] if flags else []

    def _advantage_problems(self, group_size: int) -> list[str]:
        baseline, found = self.advantage_baseline, []
        if baseline != "none" and group_size < 2:
            found.append(
                f"--group-size {group_size} with --advantage-baseline {baseline}: the only episode "
                "of a group is its own baseline, so every advantage is 0. Use --group-size of at "
                "least 2, or --advantage-baseline none."
            )
        if baseline == "none" and self.advantage_normalization == "group-std":
            found.append(
                "--advantage-normalization group-std divides distances from the group's mean: use "
                "it with --advantage-baseline group-mean, or use batch."
            )
        if baseline == "none" and self.zero_variance_groups == "drop":
            found.append(
                "--zero-variance-groups drop with --advantage-baseline none would drop groups that "
                "carry a signal. Use train, or a group baseline."
            )
        return found

    def _ratio_problems(self, updates_per_batch: int, normalization: str) -> list[str]:
        loss, found = self.policy_loss, []
        if loss == "likelihood" and updates_per_batch > 1 and not self.sampler_correction_cap:
            found.append(
                f"--policy-loss likelihood with {updates_per_batch} updates per rollout batch: "
                "after the first one its tokens come from another policy. Use one update, or "
                "--sampler-correction-cap, or --policy-loss importance or clip."
            )
        if self.old_policy == "sampler" and self.sampler_correction_cap and loss != "likelihood":
            found.append(
                "--sampler-correction-cap corrects from the sampler to the old policy, but with "
                "--old-policy sampler they are the same. Use --old-policy trainer, or cap 0."
            )
        if self.dual_clip and loss != "clip":
            found.append(f"--dual-clip needs --policy-loss clip: {loss} has no such bound.")
        if self.ratio_level == "token":
            return found
        if loss in ("likelihood", "cispo"):
            found.append(
                f"--ratio-level sequence with --policy-loss {loss}: its gradient is each token's "
                "own. Use clip (GSPO) or importance, or --ratio-level token."
            )
        if normalization != "sample-mean":
            found.append(
                f"--ratio-level sequence with --loss-normalization {normalization}: a sequence has "
                "one ratio, which would count once for each of its tokens. Use sample-mean."
            )
        return found

    def _kl_problems(self, has_reference: bool) -> list[str]:
        found = []
        if self.needs_reference and not has_reference:
            found.append(
                f"--kl-coefficient {self.kl_coefficient} needs a reference policy and there is "
                "none: give one, or use 0."
            )
        if self.has_kl_loss and self.kl_estimator == "k1":
            found.append(
                "--kl-estimator k1 in the loss has the gradient of log p, without the reference, "
                "and 0 on average. Use k2 or k3, or --kl-placement reward."
            )
        return found
