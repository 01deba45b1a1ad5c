"""One parameter update: clip, optimizer step, schedule; its results are known to every rank.

Invariant the tests check: a run whose first steps trained nothing can be saved and resumed.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
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


def skip_update(model: TrainableModel, *, num_samples: int) -> None:
    """Only move the schedule on; the optimizer then has a state to save even before any update."""
    for optimizer in getattr(model.optimizer, "chained_optimizers", [model.optimizer]):
        if getattr(optimizer, "is_stub_optimizer", False) or optimizer.optimizer.state:
            continue
        if isinstance(optimizer, DistributedOptimizer):
            optimizer.load_state_dict(optimizer.state_dict())  # makes room, as before loading
            for state in optimizer.optimizer.state.values():
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name].zero_()
        else:
            optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
        for group in optimizer.optimizer.param_groups:
            group.setdefault("step", 0)
    model.scheduler.step(increment=num_samples)
