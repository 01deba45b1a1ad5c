"""The numbers of a step: what was rolled out, what became of it, what the updates saw.

Invariant the tests check: the same on every rank; a share is of all episodes of the step, whatever
was filtered.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_ext.environments.episode import Episode
from megatron_ext.evaluation.tasks import PASSING_REWARD
from megatron_ext.rl.learning import Learned
from megatron_ext.rl.policy import Update

_ROUNDING = 1e-6


def rollout_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Rewards, lengths and endings of the episodes; lengths count what the policy sampled.

    The mean lengths of passed and of failed episodes are left out where there is none.
    """
    valid = [episode for episode in episodes if episode.is_valid]
    found: dict[str, float] = {
        "episodes": len(episodes),
        "invalid_share": 1 - len(valid) / len(episodes),
        "environment_warnings": sum(len(episode.warnings) for episode in episodes),
    }
    if not valid:
        return found
    rewards = torch.tensor([e.reward for e in valid], dtype=torch.float64)
    lengths = torch.tensor([e.num_sampled for e in valid], dtype=torch.float64)
    quantiles = lengths.quantile(torch.tensor([0, 0.5, 0.9, 1], dtype=torch.float64)).tolist()
    names = ("min", "median", "p90", "max")
    passed = rewards >= PASSING_REWARD - _ROUNDING
    for name, chosen in (("passed", passed), ("failed", ~passed)):
        if chosen.any():
            found[f"response_tokens_{name}"] = float(lengths[chosen].mean())
    return found | {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std(correction=0)),
        "pass_rate": float(passed.double().mean()),
        **{f"response_tokens_{name}": v for name, v in zip(names, quantiles, strict=True)},
        "turns_mean": sum(e.num_turns for e in valid) / len(valid),
        "truncated_share": sum(e.is_truncated for e in valid) / len(valid),
    }


def learning_metrics(learned: Learned) -> dict[str, float]:
    """What filters, advantages and updates did; statistics are means over all updates' tokens."""
    counts, scored, updates = learned.scored.counts, learned.scored, learned.updates
    num_valid = counts["episodes"] - counts["invalid"]
    is_zero_E = scored.advantages_E == 0
    num_trained = max(counts["trained"], 1)
    found: dict[str, float] = {
        "trained_episodes": counts["trained"],
        "masked_episodes": counts["overlong_masked"],
        "dropped_episodes": counts["zero_variance_dropped"],
        "zero_variance_group_share": counts["zero_variance_groups"] / max(counts["groups"], 1),
        "zero_advantage_share": (
            int((is_zero_E & scored.is_trained_E).sum()) + counts["zero_variance_dropped"]
        )
        / max(num_valid, 1),
        "advantage_abs_mean": float(scored.advantages_E.abs().sum()) / num_trained,
        "updates": len(updates),
        "tokens": learned.num_tokens,
        "trained_tokens": sum(u.num_trained for u in updates),
        **scored.shaping,
    }
    if not updates:
        return found
    if sent := sum(u.pipeline_sent_bytes for u in updates):
        found["pipeline_sent_bytes"] = sent
    positions = sum(u.num_positions for u in updates)
    return found | {
        "loss": _mean([u.loss for u in updates]),
        "grad_norm": _mean([u.grad_norm for u in updates]),
        "lr": updates[-1].learning_rate,
        "skipped_updates": sum(u.skipped for u in updates),
        "padding_share": 1 - learned.num_passes * learned.num_tokens / max(positions, 1),
        **statistics_of(updates),
    }


def statistics_of(updates: Sequence[Update]) -> dict[str, float]:
    """The objective's statistics over the trained tokens of several updates."""
    total = max(sum(update.num_trained for update in updates), 1)
    return {
        name: sum(u.statistics[name] * u.num_trained for u in updates) / total
        for name in updates[0].statistics
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
