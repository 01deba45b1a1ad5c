"""What fixes the model of a run: --hf-model, and what --load has kept of the one it was made from.

A converted checkpoint, and every checkpoint of a run that began with one, carries its config.json
and stop ids among its arguments.  So what the model cannot do (a length beyond its sliding window)
and what no tensor shows (its rotary positions) is known wherever the checkpoint is loaded.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.upstream.checkpoint_reading import common_of
from megatron_ext.upstream.checkpoint_source import find_source
from megatron_ext.upstream.command_line import GivenFlag
from megatron_ext.upstream.convert_target import HF_FOLDER
from megatron_ext.upstream.hf_flags import checkpoint_values
from megatron_ext.weights.architecture import Architecture
from megatron_ext.weights.checks import open_checkpoint
from megatron_ext.weights.families import architecture_of
from megatron_ext.weights.stop_ids import ids_in, stop_ids_of

RECORD = "hf_record"
"""The argument, no flag, that checkpoints carry it in."""


@dataclass(frozen=True, kw_only=True)
class Described:
    """A checkpoint that says what its model is."""

    flag: str
    """That names it, with its value."""
    config: Mapping[str, Any]
    """The fields of its config.json."""
    stop_ids: tuple[int, ...]
    architecture: Architecture
    notes: tuple[str, ...] = ()
    """What a user should know of it."""

    def record(self) -> dict[str, Any]:
        """Plain values, for a checkpoint's arguments."""
        config = json.loads(json.dumps(dict(self.config)))
        return {"config": config, "stop_ids": list(self.stop_ids)}


def described(args: Namespace) -> list[Described]:
    """The checkpoints that the flags name and that say what their model is; --hf-model first.

    Raises:
        ValueError: one cannot be used.
    """
    found = [_of_hf_model(args)] if args.hf_model else []
    try:
        source = find_source(args)
    except (OSError, ValueError):
        source = None  # said when it is loaded
    kept = read_record(source.folder) if source is not None else None
    if source is not None and kept is not None:
        flag = f"--load {args.load}" if args.load else f"--pretrained-checkpoint {source.folder}"
        found.append(of_record(kept, flag=flag))
    return found


def checked_values(
    args: Namespace, given: Sequence[GivenFlag], found: Sequence[Described]
) -> dict[str, Any]:
    """Values of Megatron's arguments that fit every one of the described checkpoints.

    Raises:
        ValueError: Megatron cannot express one, flags contradict it, or two are different models.
    """
    if not found:
        return {}
    all_values = [_values(args, given, checkpoint) for checkpoint in found]
    first = all_values[0]
    wrong = [
        f"{found[0].flag} has {name} {first[name]}, {other.flag} was made from a model with "
        f"{values[name]}: drop one of the two flags."
        for other, values in zip(found[1:], all_values[1:], strict=True)
        for name in sorted(first.keys() & values.keys() - _SUGGESTED)
        if first[name] != values[name]
    ]
    if wrong:
        raise ValueError("\n  ".join(wrong))
    return first | {RECORD: found[0].record()}


def _values(args: Namespace, given: Sequence[GivenFlag], checkpoint: Described) -> dict[str, Any]:
    try:
        return checkpoint_values(args, given, architecture=checkpoint.architecture)
    except ValueError as error:
        raise ValueError(f"{checkpoint.flag}: {error}") from error


_SUGGESTED = {"max_position_embeddings", "attention_dropout", "hidden_dropout", "moe_router_dtype"}
"""Values that are no part of the model."""


def stop_ids_of_record(args: Namespace) -> frozenset[int]:
    """The ids that end a response of the run's model."""
    return frozenset((getattr(args, RECORD, None) or {}).get("stop_ids", ()))


def tokenizer_folder(args: Namespace) -> str | None:
    """Where the tokenizer of the run's model is, unless a flag says otherwise; None = unknown."""
    if args.hf_model:
        return args.hf_model
    kept = Path(args.load or "") / HF_FOLDER
    return str(kept) if args.load and (kept / "tokenizer.json").is_file() else None


def read_record(folder: Path) -> Mapping[str, Any] | None:
    """What a torch_dist checkpoint carries; None if it carries nothing, or is damaged."""
    try:
        common = common_of(folder)
    except ValueError:
        return None  # said when it is loaded
    return getattr(common.get("args"), RECORD, None)


def of_record(kept: Mapping[str, Any], *, flag: str) -> Described:
    """What a record describes.

    Raises:
        ValueError: its config.json cannot be read.
    """
    config = kept["config"]
    return Described(
        flag=flag,
        config=config,
        stop_ids=tuple(kept["stop_ids"]),
        architecture=architecture_of(config),
    )


def _of_hf_model(args: Namespace) -> Described:
    path = Path(args.hf_model)
    checkpoint = open_checkpoint(path, drop_mtp=args.drop_mtp_layers)
    is_gguf = path.suffix == ".gguf"  # whose tokens take seconds to read
    ids = ids_in(checkpoint.config, file=path) if is_gguf else stop_ids_of(path)
    return Described(
        flag=f"--hf-model {args.hf_model}",
        config=checkpoint.config,
        stop_ids=tuple(sorted(ids)),
        architecture=checkpoint.architecture,
        notes=checkpoint.notes,
    )
