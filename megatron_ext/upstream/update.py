"""One parameter update: clip, optimizer step, schedule; its results are known to every rank."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.training.utils import (
    logical_and_across_model_parallel_group,
    reduce_max_stat_across_model_parallel_group,
)

from megatron_ext.upstream.layout import Layout
from megatron_ext.upstream.model import TrainableModel


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """What one parameter update did, the same on every rank."""

    grad_norm: float
    learning_rate: float
    skipped: bool
    """The optimizer refused the gradients (overflow in fp16)."""


def update(model: TrainableModel, layout: Layout, *, num_samples: int) -> UpdateResult:
    """Clip, update the parameters and move the schedule on by ``num_samples``.  Collective."""
    succeeded, grad_norm, _ = model.optimizer.step()
    succeeded = logical_and_across_model_parallel_group(succeeded, group=layout.groups.mp)
    grad_norm = reduce_max_stat_across_model_parallel_group(grad_norm, group=layout.groups.mp)
    rate = max((group["lr"] for group in model.optimizer.param_groups), default=0.0)
    if succeeded:
        model.scheduler.step(increment=num_samples)
    return UpdateResult(
        grad_norm=float(grad_norm or 0.0), learning_rate=rate, skipped=not succeeded
    )
