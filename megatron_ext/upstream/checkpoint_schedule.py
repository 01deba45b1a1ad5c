"""The learning-rate schedule of a checkpoint against the flags': compared, then one of them taken.

Megatron stops at an assertion when they differ, and its two flags that settle it fail for a changed
learning rate: saved parameter groups are found by their rates.  Here a difference that changes no
rate (the length of a constant schedule) is none, any other is one message, and both flags work.
Not covered: the annealing length of the WSD schedule and the start of the warm-up, which Megatron
does not save: the flags' values hold.
"""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

_FLAGS = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "lr_decay_style": "--lr-decay-style",
    "lr_decay_steps": "--train-iters (or --lr-decay-iters)",
    "lr_warmup_steps": "--lr-warmup-iters (or --lr-warmup-fraction)",
    "start_wd": "--start-weight-decay (or --weight-decay)",
    "end_wd": "--end-weight-decay (or --weight-decay)",
    "wd_incr_style": "--weight-decay-incr-style",
    "wd_incr_steps": "--train-iters",
}
"""Value of Megatron's scheduler -> the flag that it comes from."""
_ARGUMENTS = {"decoupled_lr": "--decoupled-lr", "decoupled_min_lr": "--decoupled-min-lr"}
_RATES = ("max_lr", "min_lr", "start_wd", "end_wd")
_OF_OPTIMIZER = ("betas", "eps", "momentum", "nesterov")
"""Values of a parameter group that flags set and no schedule changes."""
_STRUCTURE = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")


def schedule_problems(
    args: Namespace,
    *,
    scheduler: OptimizerParamScheduler,
    saved_args: Namespace,
    saved: Mapping[str, Any],
) -> list[str]:
    """How the saved schedule differs from the flags', as one text; empty if a flag settles it.

    saved: the scheduler's saved values.
    """
    if args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler:
        return []
    mine = scheduler.state_dict()
    lines = [
        f"{flag}: {_shown(name, saved[name], saved_args)} in the checkpoint, "
        f"{_shown(name, mine[name], args)} now"
        for name, flag in _FLAGS.items()
        if name in saved and saved[name] != mine[name] and _matters(name, mine, saved)
    ]
    for name, flag in _ARGUMENTS.items():
        before, now = getattr(saved_args, name, None), getattr(args, name, None)
        lines += [f"{flag}: {before} in the checkpoint, {now} now"] if before != now else []
    if not lines:
        return []
    return [
        "another learning-rate schedule: "
        + "; ".join(lines)
        + ". Add --override-opt-param-scheduler to go on with the flags' values, or "
        "--use-checkpoint-opt-param-scheduler to go on with the checkpoint's."
    ]


def restore_schedule(
    args: Namespace, *, scheduler: OptimizerParamScheduler, saved: Mapping[str, Any]
) -> None:
    """Move the scheduler to the saved position, with the values that the flags ask for."""
    values = dict(saved)
    if not args.use_checkpoint_opt_param_scheduler:
        own = scheduler.state_dict()
        values |= {name: own[name] for name in _FLAGS if name in saved}
    scheduler.load_state_dict(values)
    scheduler.step(0)  # Megatron sets the weight decay's values after it has computed the decay


def parameter_groups(state: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """The parameter groups in a saved optimizer state, of chained optimizers one after another."""
    if "param_groups" in state:
        return state["param_groups"]
    nested = [state[key] for key in sorted(state, key=str) if isinstance(state[key], Mapping)]
    return [group for value in nested for group in parameter_groups(value)]


def group_problems(optimizer: MegatronOptimizer, saved: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whether the saved parameter groups are of another structure than the optimizer's."""
    mine = {_structure(group) for group in optimizer.param_groups}
    theirs = {_structure(group) for group in saved}
    if not saved or mine == theirs:
        return []
    return [
        f"the optimizer has parameter groups {sorted(mine)}, the checkpoint {sorted(theirs)} (each "
        f"is {', '.join(_STRUCTURE)}): use the flags of weight decay and learning rates it was "
        "saved with, or drop the optimizer state with --no-load-optim."
    ]


def settle_rates(
    args: Namespace, *, optimizer: MegatronOptimizer, saved: Sequence[dict[str, Any]]
) -> None:
    """Give saved and own parameter groups the same rates, by which Megatron finds its own.

    Saved groups also get what the flags say of the optimizer, which PyTorch would overwrite.
    """
    own_of_kind = defaultdict(list)
    for group in optimizer.param_groups:
        own_of_kind[_structure(group)].append(group)
    for group in saved:
        same = own_of_kind[_structure(group)]
        own = same[0] if len(same) == 1 else same.pop(0)
        winner, loser = (group, own) if args.use_checkpoint_opt_param_scheduler else (own, group)
        for name in _RATES:
            if name in winner:
                loser[name] = winner[name]
            else:
                loser.pop(name, None)
        group |= {name: own[name] for name in _OF_OPTIMIZER if name in own}


def _structure(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(group.get(name) for name in _STRUCTURE)


def _matters(name: str, mine: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Whether a value changes any rate: a constant schedule has neither length nor minimum."""
    style = "wd_incr_style" if name.startswith("wd_") else "lr_decay_style"
    if name in ("lr_decay_steps", "min_lr", "wd_incr_steps"):
        return (mine[style], saved.get(style)) != ("constant", "constant")
    return True


def _shown(name: str, value: Any, args: Namespace) -> str:
    """Megatron counts a schedule's steps in samples; the flags count iterations."""
    if not name.endswith("_steps"):
        return str(value)
    return f"{value / args.global_batch_size:g} iterations of {args.global_batch_size} samples"
