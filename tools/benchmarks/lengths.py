"""Sequence lengths of seed document 000, drawn as it draws them."""

from __future__ import annotations

import torch

EPISODE_QUANTILES = {0.0: 10, 0.5: 18, 0.9: 79, 1.0: 149}
"""Tokens of its 64 episodes; padded to the longest, 74 % of the positions hold nothing."""
LONGEST_AGENT = 65_536
AGENT_BUDGET = 131_072
"""Tokens of a microbatch of agent trajectories."""


def episode_lengths(count: int, *, seed: int = 0) -> list[int]:
    """`count` lengths with the quantiles of the episodes, linear in between, shuffled."""
    marks = torch.tensor(list(EPISODE_QUANTILES), dtype=torch.float64)
    values = torch.tensor(list(EPISODE_QUANTILES.values()), dtype=torch.float64)
    shares = torch.linspace(0, 1, count, dtype=torch.float64)
    upper = torch.searchsorted(marks, shares).clamp(1, len(marks) - 1)
    part = (shares - marks[upper - 1]) / (marks[upper] - marks[upper - 1])
    lengths = (values[upper - 1] + part * (values[upper] - values[upper - 1])).round().long()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return lengths[order].tolist()


def agent_lengths() -> tuple[list[int], list[int]]:
    """Lengths of 512 agent trajectories (median 8,414, longest 65,536), and a random order."""
    generator = torch.Generator().manual_seed(0)
    lengths = 8192 * torch.exp(0.8 * torch.randn(512, generator=generator))
    lengths = lengths.clamp(256, LONGEST_AGENT).long()
    return lengths.tolist(), torch.randperm(512, generator=generator).tolist()
