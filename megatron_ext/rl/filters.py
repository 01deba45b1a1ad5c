"""Which episodes are trained, and a count for each reason why one is not.

An episode that is not trained is not packed, so it takes no time and is not in N.  It is counted
under the first reason that holds: invalid, zero-variance, overlong.  Rewards here are those that
were earned, before any shaping.
Invariant the tests check: trained and the reasons add up to all episodes; counts of ranks add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from megatron_ext.rl.advantages import group_statistics
from megatron_ext.rl.types import Episodes


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What is trained of a rank's episodes."""

    is_trained_E: Tensor
    """Which episodes are trained, bool."""
    counts: dict[str, int]
    """Integers to be added over ranks, the same names on each."""


def select_episodes(
    episodes: Episodes,
    *,
    overlong_episodes: Literal["train", "mask"],
    zero_variance_groups: Literal["train", "drop"],
) -> Selection:
    """The episodes to train, and how many there were of what.

    Counts: episodes, groups, truncated and zero_variance_groups are what was seen; invalid,
    zero_variance_dropped, overlong_masked and trained say what became of each episode.
    """
    valid_E = episodes.is_valid_E
    is_flat_E = group_statistics(episodes).is_constant_E & valid_E
    dropped_E = is_flat_E & (zero_variance_groups == "drop")
    masked_E = valid_E & ~dropped_E & episodes.is_truncated_E & (overlong_episodes == "mask")
    trained_E = valid_E & ~dropped_E & ~masked_E
    return Selection(
        is_trained_E=trained_E,
        counts={
            "episodes": len(valid_E),
            "groups": len(episodes.groups_E.unique()),
            "zero_variance_groups": len(episodes.groups_E[is_flat_E].unique()),
            "truncated": int(episodes.is_truncated_E.sum()),
            "invalid": int((~valid_E).sum()),
            "zero_variance_dropped": int(dropped_E.sum()),
            "overlong_masked": int(masked_E.sum()),
            "trained": int(trained_E.sum()),
        },
    )
