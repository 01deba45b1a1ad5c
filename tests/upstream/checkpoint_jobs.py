"""What a rank does in the tests of checkpoints: runs of pretrain_rl.py, and reading folders."""

from __future__ import annotations

import copy
import itertools
import json
import os
import random
import resource
import shutil
import signal
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from shlex import split
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.training.checkpointing import load_checkpoint, save_checkpoint

import pretrain_rl
from megatron_ext.upstream import checkpoint
from megatron_ext.upstream.arguments import parse
from megatron_ext.upstream.checkpoint_folder import TRACKER, folder_of
from megatron_ext.upstream.checkpoint_random import random_states, restore_random
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.layout import Layout, open_layout
from megatron_ext.upstream.model import TrainableModel, build_trainable

DENSE = split(
    "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --ffn-hidden-size 24 --seq-length 24 --vocab-size 257 "
    "--tokenizer-type NullTokenizer --position-embedding-type rope --swiglu "
    "--normalization RMSNorm --disable-bias-linear --init-method-std 0.1 "
    "--untie-embeddings-and-output-weights --train-iters 4 --save-interval 1 --lr 1e-2 "
    "--min-lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 1 --adam-eps 1e-5 "
    "--global-batch-size 8 --seed 5 --text-unit line "
    "--no-report-html --no-tensorboard-events --progress-interval-seconds 0"
)
MOE = split("--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none")
EXACT = split("--attention-dropout 0 --hidden-dropout 0")
DROPOUT = split("--attention-dropout 0.1 --hidden-dropout 0.2")
FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
TIMINGS = {"seconds", "tokens_per_second", "peak_memory_bytes"}


def write_text(path: Path) -> Path:
    """Twenty-one lines of 3 to 23 letters: less than three batches of eight make an epoch."""
    draw = random.Random(3)
    lines = ["".join(draw.choices("abcdefgh", k=draw.randint(3, 23))) for _ in range(21)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def flags_of(run: Path, *more: str) -> list[str]:
    """A command that starts or continues the run in a folder."""
    text = run.parent / "text.txt"
    return [
        *DENSE,
        *("--train-data", str(text if text.exists() else write_text(text))),
        *("--save", str(run / "saved"), "--load", str(run / "saved")),
        *("--output-dir", str(run / "out")),
        *more,
    ]


def train(flags: list[str]) -> None:
    """One command, from start to end."""
    pretrain_rl.main(flags)


def kill_at(matches: Callable[[str, str], bool], *, count: int = 0) -> None:
    """Have this process killed just before its file operation number ``count`` that matches.

    matches: of the name of Python's audit event and the path; both of a rename's are tried.
    """
    seen = itertools.count()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in FILE_EVENTS:
            return
        paths = [os.fsdecode(path) for path in arguments[:2] if isinstance(path, str | os.PathLike)]
        if any(matches(event, path) for path in paths) and next(seen) == count:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


KILLS: dict[str, Callable[[str, str], bool]] = {
    "writing": lambda event, path: event == "open" and ".partial-" in path,
    "in place": lambda event, path: event == "os.rename" and "0000002.partial-" in path,
    "tracker": lambda event, path: event == "os.rename" and path.endswith(f".{TRACKER}"),
    "replacing": lambda event, path: event == "shutil.rmtree" and "0000002.deleted-" in path,
    "deleting": lambda event, path: event == "shutil.rmtree" and "0000003.deleted-" in path,
}
"""Moments just before: the first file of a checkpoint, moving it into place, naming it in the
tracker, deleting one of the same step, deleting one that is too old."""


def train_killed(flags: list[str], moment: str) -> None:
    """A command that is killed at the first of these moments."""
    kill_at(KILLS[moment])
    train(flags)


def train_without_room(flags: list[str]) -> str:
    """The error of a command on a disk that takes no file larger than 100 kB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    with pytest.raises(OSError) as raised:
        train(flags)
    return str(raised.value)


def build(flags: list[str]) -> tuple[Namespace, TrainableModel, Layout]:
    """Megatron's arguments, the model and the layout of a command; inside ``device_mode()``."""
    args = parse(flags).megatron
    layout = open_layout(args)
    return args, build_trainable(args, layout), layout


def resume(flags: list[str]) -> dict[str, Any]:
    """What a command starts from, on this rank."""
    with device_mode():
        args, model, layout = build(flags)
        progress = checkpoint.resume(args, model, layout, samples_id="ours")
        return {
            "progress": (progress.step, progress.consumed_samples),
            "weights": [p.detach().float() for c in model.chunks for p in c.parameters()],
            "moments": [
                values["exp_avg"]
                for optimizer in model.optimizer.chained_optimizers
                for values in optimizer.optimizer.state.values()
            ],
            "schedule": model.scheduler.num_steps,
            "rates": [(group["lr"], group["max_lr"]) for group in model.optimizer.param_groups],
            "draw": torch.rand(4),
        }


def refusal(flags: list[str], error: type[Exception] = ValueError) -> str:
    """Why a command cannot start from its checkpoint; the model must be as it was."""
    with device_mode():
        args, model, layout = build(flags)
        before = [p.detach().clone() for chunk in model.chunks for p in chunk.parameters()]
        with pytest.raises(error) as raised:
            checkpoint.resume(args, model, layout)
        after = [p for chunk in model.chunks for p in chunk.parameters()]
        assert all(map(torch.equal, before, after))
        return str(raised.value)


def random_streams(flags: list[str]) -> tuple[list[Any], list[Any], bool]:
    """Draws after the states were taken, draws after they were restored; whether a GPU's were."""
    with device_mode():
        _, _, layout = build(flags)
        [(_, _), (_, own)] = random_states(layout).items()
        taken = copy.deepcopy(own.data)
        before = draws()
        assert restore_random(taken, layout=layout)
        after = draws()
        taken[0]["rng_tracker_states"] = dict.fromkeys(
            taken[0]["rng_tracker_states"], torch.zeros(16, dtype=torch.uint8)
        )
        return before, after, restore_random(taken, layout=layout)


def draws() -> list[Any]:
    """A number of every stream: Python's, numpy's, torch's, and those of Megatron's tracker."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    found = [random.random(), np.random.rand(), torch.rand(1).item()]
    for name in tracker.get_states():
        with tracker.fork(name):
            found.append(torch.rand(1).item())
    return found


def saved_again(flags: list[str], to: Path, *, by_megatron: bool, **options: Any) -> None:
    """Load a checkpoint and save it, both by Megatron's functions or both by ours."""
    with device_mode():
        args, model, layout = build(flags)
        parts = (model.chunks, model.optimizer, model.scheduler)
        if by_megatron:
            step, _ = load_checkpoint(*parts)
            vars(args).update(save=str(to), **options)
            save_checkpoint(step, *parts, 0)
        else:
            progress = checkpoint.resume(args, model, layout)
            other = Namespace(**vars(args) | {"save": str(to)})
            checkpoint.save(other, model, layout, progress=progress)


def copy_run(run: Path, to: Path, *, step: int) -> None:
    """What a run that was killed after saving ``step`` would have left."""
    shutil.copytree(folder_of(run / "saved", step), folder_of(to / "saved", step))
    shutil.copytree(run / "out", to / "out")
    (to / "saved" / TRACKER).write_text(str(step))


def metrics(run: Path) -> list[dict[str, Any]]:
    """The logged lines of a run without what a clock or the machine decides."""
    lines = [json.loads(line) for line in (run / "out" / "metrics.jsonl").read_text().splitlines()]
    return [{k: value for k, value in line.items() if k not in TIMINGS} for line in lines]


def losses(run: Path) -> list[float]:
    """The logged losses of a run."""
    return [line["loss"] for line in metrics(run)]


def differences(one: Path, other: Path) -> list[str]:
    """Names of all that is not bit-equal in two checkpoint folders; runs on one rank.

    Tensors, random states, schedule, parameter groups and the position; not the options.
    """
    with device_mode():
        mine, theirs = _everything(one), _everything(other)
    names = mine.keys() ^ theirs.keys()
    names |= {k for k in mine.keys() & theirs.keys() if not _equal(mine[k], theirs[k])}
    return sorted(names)


def _everything(folder: Path) -> dict[str, Any]:
    contents = load_sharded_metadata(str(folder))
    objects = {
        k: v
        for k, v in contents.items()
        if isinstance(v, ShardedObject) and v.key != "common_state"
    }
    tensors = dist_checkpointing.load_plain_tensors(str(folder))
    common = dist_checkpointing.load_common_state_dict(str(folder))
    loaded = dist_checkpointing.load(dict(objects), str(folder), validate_access_integrity=False)
    consumed = common.pop("args").consumed_train_samples
    found = {k: v for k, v in tensors.items() if torch.is_tensor(v)}
    assert any(key.startswith("optimizer.state.exp_avg") for key in found)
    return found | {k: loaded[k] for k in objects} | common | {"consumed_samples": consumed}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor | np.ndarray):
        return bool((one == other).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return one == other
