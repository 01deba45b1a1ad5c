"""The tables of docs/numerics.md are what the planned microbatches give, packed and padded."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
import torch

from megatron_ext.packing import PackingConfig, Sample
from megatron_ext.packing.config import FIXED_DENOMINATOR_MODES
from megatron_ext.packing.plan import ReplicaLayout, plan_step

PAGE = (Path(__file__).resolve().parents[2] / "docs/numerics.md").read_text()
MODES = ("token-sum", "global-token-mean", "row-mean", "sample-mean", "turn-mean", "constant")
MAX_LENGTH = 8


def sample(losses: list[float], turns: list[int]) -> Sample:
    """A prompt token, then these token losses; turn -1 = not trained."""
    turn_ids = torch.tensor([-1, *turns])
    return Sample(
        tokens=torch.arange(len(turn_ids)),
        mask=turn_ids >= 0,
        turn_ids=turn_ids,
        extras={"loss": torch.tensor([0.0, *losses])},
    )


BATCH = [sample([2, 4, 50, 6], [0, 0, -1, 1]), sample([8], [0]), sample([9], [-1])]
"""A: turns [2, 4] and [6] around a tool's token.  B: [8].  C: nothing to train."""


def step(mode: str, *, packing: bool, denominator: str = "counted") -> tuple[list, int, float]:
    """Weights of the trained tokens in the order of their losses, N, and the loss."""
    plan = plan_step(
        BATCH,
        PackingConfig(
            packing=packing,
            loss_normalization=mode,
            loss_denominator=denominator,
            loss_normalization_max_length=MAX_LENGTH,
        ),
        replica=ReplicaLayout(),
        seq_length=10,
        micro_batch_size=1,
        global_batch_size=len(BATCH),
    )
    weights = {}
    for microbatch in plan.microbatches:
        trained = microbatch.weights_BS > 0
        losses = microbatch.extras["loss"][trained].tolist()
        weights |= dict(zip(losses, microbatch.weights_BS[trained].tolist(), strict=True))
    count = sum(microbatch.count for microbatch in plan.microbatches)
    total = sum(loss * weight for loss, weight in weights.items())
    return [weights[loss] for loss in sorted(weights)], count, total / count


def shown(number: float) -> str:
    return f"{number:.4f}".rstrip("0").rstrip(".")


def both(padded: object, packed: object) -> str:
    return str(padded) if padded == packed else f"{padded} (packed {packed})"


@pytest.mark.parametrize("mode", MODES)
def test_worked_example(mode: str) -> None:
    ways = [step(mode, packing=packing) for packing in (False, True)]
    weights = [
        ", ".join(str(Fraction(weight).limit_denominator(20)) for weight in of_way)
        for of_way, *_ in ways
    ]
    cells = [weights, [count for _, count, _ in ways], [shown(loss) for *_, loss in ways]]
    assert " | ".join([f"| `{mode}`", *(both(*cell) for cell in cells)]) + " |" in PAGE


@pytest.mark.parametrize("mode", FIXED_DENOMINATOR_MODES)
def test_three_denominators(mode: str) -> None:
    losses = [
        step(mode, packing=True, denominator=name)[2]
        for name in ("one", "global-batch-size", "counted")
    ]
    assert f"| `{mode}` | " + " | ".join(map(shown, losses)) + " |" in PAGE
