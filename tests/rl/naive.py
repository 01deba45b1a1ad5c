"""The reinforcement-learning formulas in plain Python floats, gradients derived by hand.

Nothing imports the code it checks, except the options that say which formula is meant.
An episode is lists aligned with its tokens; token t is trained if mask[t], and never for t = 0.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_ext.rl.config import AlgorithmConfig

LIMIT = 20.0


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One episode; everything but `advantage` has one entry per token."""

    logp: list[float]
    old: list[float]
    sampler: list[float]
    reference: list[float]
    entropy: list[float]
    mask: list[bool]
    advantage: float

    @property
    def trained(self) -> list[int]:
        return [t for t in range(1, len(self.mask)) if self.mask[t]]


def limited(log_ratio: float) -> float:
    return max(-LIMIT, min(LIMIT, log_ratio))


def clipped(ratio: float, low: float, high: float) -> float:
    return max(1 - low, min(1 + high, ratio))


def kl(logp: float, reference: float, estimator: str) -> tuple[float, float]:
    """An estimate and its derivative in logp."""
    d = limited(reference - logp)
    slope = 1.0 if abs(reference - logp) <= LIMIT else 0.0
    match estimator:
        case "k1":
            return -d, slope
        case "k2":
            return d * d / 2, -d * slope
        case "k3":
            return math.expm1(d) - d, (1 - math.exp(d)) * slope
    raise ValueError(estimator)


def surrogate(
    ratio: float, slope: float, advantage: float, *, low: float, high: float, dual: float = 0
) -> tuple[float, float]:
    """PPO's loss and its derivative in log p; slope: derivative of the ratio in log p."""
    if advantage > 0 and ratio > 1 + high:
        return -advantage * (1 + high), 0.0
    if advantage < 0 and ratio < 1 - low:
        return -advantage * (1 - low), 0.0
    if advantage < 0 and dual and ratio > dual:
        return -advantage * dual, 0.0
    return -advantage * ratio, -advantage * slope


def token_losses(
    episode: Episode, config: AlgorithmConfig, *, updates: int
) -> tuple[dict[int, float], dict[int, float]]:
    """Loss of every trained token, and the derivative of their sum in each one's log-prob."""
    found: dict[int, float] = {}
    slopes: dict[int, float] = {}
    log_ratios = {t: episode.logp[t] - old(episode, t, config, updates) for t in episode.trained}
    if config.ratio_level == "sequence":
        mean = math.fsum(log_ratios.values()) / max(len(log_ratios), 1)
        log_ratios = dict.fromkeys(log_ratios, mean)
    for t, log_ratio in log_ratios.items():
        ratio = math.exp(limited(log_ratio))
        slope = ratio if abs(log_ratio) <= LIMIT else 0.0
        loss, gradient = policy_loss(episode.logp[t], ratio, slope, episode.advantage, config)
        if config.sampler_correction_cap:
            weight = sampler_weights(episode, config, updates=updates)[t]
            loss, gradient = loss * weight, gradient * weight
        if config.kl_coefficient and config.kl_placement == "loss":
            term, term_slope = kl(episode.logp[t], episode.reference[t], config.kl_estimator)
            loss += config.kl_coefficient * term
            gradient += config.kl_coefficient * term_slope
        found[t] = loss - config.entropy_coefficient * episode.entropy[t]
        slopes[t] = gradient
    return found, slopes


def old(episode: Episode, t: int, config: AlgorithmConfig, updates: int) -> float:
    """log p_old: a loss without ratio and a batch's only update compare with themselves."""
    if config.policy_loss == "likelihood":
        return episode.logp[t]
    if config.old_policy == "sampler":
        return episode.sampler[t]
    return episode.old[t] if updates > 1 else episode.logp[t]


def sampler_weights(episode: Episode, config: AlgorithmConfig, *, updates: int) -> dict[int, float]:
    """p_old / p_sampler of every trained token, or of the sequence, at most the cap."""
    gaps = {t: old(episode, t, config, updates) - episode.sampler[t] for t in episode.trained}
    if config.ratio_level == "sequence" and gaps:
        gaps = dict.fromkeys(gaps, math.fsum(gaps.values()) / len(gaps))
    cap = config.sampler_correction_cap
    return {t: min(math.exp(limited(gap)), cap) for t, gap in gaps.items()}


def logged_loss(
    logps: Sequence[Sequence[float]],
    episodes: Sequence[Episode],
    config: AlgorithmConfig,
    *,
    updates: int,
    weigh: Callable[[Episode], float],
) -> float:
    """The loss of a step as a function of the policy's log-probs.

    What the algorithms hold constant keeps its value at `episodes`: the old policy, the sampler's
    weights, CISPO's clipped ratios, the entropies' own values.
    weigh: weight of each trained token of an episode.
    """
    total = 0.0
    for logp, episode in zip(logps, episodes, strict=True):
        trained, terms = episode.trained, []
        log_ratios = {t: logp[t] - old(episode, t, config, updates) for t in trained}
        held = {t: episode.logp[t] - old(episode, t, config, updates) for t in trained}
        if config.ratio_level == "sequence" and trained:
            log_ratios = dict.fromkeys(trained, math.fsum(log_ratios.values()) / len(trained))
        weights = dict.fromkeys(trained, 1.0)
        if config.sampler_correction_cap:
            weights = sampler_weights(episode, config, updates=updates)
        for t in trained:
            ratio, advantage = math.exp(limited(log_ratios[t])), episode.advantage
            low, high = 1 - config.clip_low, 1 + config.clip_high
            match config.policy_loss:
                case "likelihood":
                    term = -advantage * logp[t]
                case "importance":
                    term = -advantage * ratio
                case "cispo":
                    clipped_ratio = min(max(math.exp(limited(held[t])), low), high)
                    term = -advantage * clipped_ratio * logp[t]
                case _:
                    term = -min(ratio * advantage, min(max(ratio, low), high) * advantage)
                    if advantage < 0 and config.dual_clip:
                        term = min(term, -advantage * config.dual_clip)
            term *= weights[t]
            if config.has_kl_loss:
                term += (
                    config.kl_coefficient
                    * kl(logp[t], episode.reference[t], config.kl_estimator)[0]
                )
            terms.append(term - config.entropy_coefficient * episode.entropy[t])
        total += weigh(episode) * math.fsum(terms)
    return total


def policy_loss(
    logp: float, ratio: float, slope: float, advantage: float, config: AlgorithmConfig
) -> tuple[float, float]:
    low, high = config.clip_low, config.clip_high
    match config.policy_loss:
        case "likelihood":
            return -advantage * logp, -advantage
        case "importance":
            return -advantage * ratio, -advantage * slope
        case "clip":
            return surrogate(ratio, slope, advantage, low=low, high=high, dual=config.dual_clip)
        case "cispo":
            weight = clipped(ratio, low, high)
            return -advantage * weight * logp, -advantage * weight
    raise ValueError(config.policy_loss)


def gspo_objective(logps: Sequence[Sequence[float]], episodes: Sequence[Episode], *, low, high):
    """GSPO, eq. 5: the mean over sequences of the clipped sequence ratio times the advantage."""
    total = 0.0
    for logp, episode in zip(logps, episodes, strict=True):
        n = len(episode.trained)
        ratio = math.exp(sum(logp[t] - episode.old[t] for t in episode.trained) / n)
        total += min(
            ratio * episode.advantage, max(1 - low, min(1 + high, ratio)) * episode.advantage
        )
    return total / len(episodes)


def numerical_gradient(
    function: Callable[[list[list[float]]], float], at: list[list[float]], step: float = 1e-6
) -> list[list[float]]:
    """Central differences of a function of lists of floats."""

    def moved(i: int, t: int, by: float) -> float:
        return function([[*r[:t], r[t] + by, *r[t + 1 :]] if j == i else r for j, r in rows])

    rows = list(enumerate(at))
    return [
        [(moved(i, t, step) - moved(i, t, -step)) / (2 * step) for t in range(len(row))]
        for i, row in rows
    ]


def equal_up_to_rounding(rewards: Sequence[float]) -> bool:
    return not rewards or max(rewards) - min(rewards) <= 1e-6 * max(abs(r) for r in rewards)


def group_advantages(
    rewards: Sequence[float],
    groups: Sequence[int],
    valid: Sequence[bool],
    *,
    baseline: str,
    by_std: bool,
) -> list[float]:
    """Each valid episode's advantage in its group, 0 for the others."""
    found = []
    for i, reward in enumerate(rewards):
        members = [j for j in range(len(rewards)) if groups[j] == groups[i] and valid[j]]
        others = [rewards[j] for j in members if j != i]
        own = [rewards[j] for j in members]
        if not valid[i]:
            found.append(0.0)
        elif baseline == "none":
            found.append(reward)
        elif equal_up_to_rounding(own):
            found.append(0.0)
        else:
            mean = statistics.fmean(own if baseline == "group-mean" else others)
            found.append((reward - mean) / (statistics.stdev(own) if by_std else 1))
    return found


def whitened(values: Sequence[float], weights: Sequence[int]) -> list[float]:
    """Each value, repeated as often as its weight says, minus the mean by the deviation of all."""
    repeated = [v for v, w in zip(values, weights, strict=True) for _ in range(w)]
    if equal_up_to_rounding(repeated):
        return [0.0] * len(values)
    mean, std = statistics.fmean(repeated), statistics.pstdev(repeated)
    return [(v - mean) / std if w else 0.0 for v, w in zip(values, weights, strict=True)]
