"""A command line and a checkpoint together: what the checkpoint fixes, the flags may not deny."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ext.upstream.command_line import GivenFlag
from megatron_ext.upstream.hf_config import megatron_arguments, training_defaults
from megatron_ext.weights.architecture import Architecture


def checkpoint_values(
    args: Namespace, given: Sequence[GivenFlag], *, architecture: Architecture
) -> dict[str, Any]:
    """Values of Megatron's arguments that make a parsed command line fit a checkpoint.

    ``--seq-length`` is the longest sequence of the run; without it, the longest the checkpoint
    claims.

    Raises:
        ValueError: Megatron cannot express the architecture, or flags contradict it (all listed).
    """
    values = megatron_arguments(architecture, max_length=args.seq_length)
    wrong = _contradictions(args, given, values)
    if wrong:
        raise ValueError("\n  ".join(wrong))
    names = {flag.name for flag in given}
    suggested = training_defaults(architecture)
    return {name: value for name, value in suggested.items() if name not in names} | values


def _contradictions(
    args: Namespace, given: Sequence[GivenFlag], values: Mapping[str, Any]
) -> list[str]:
    found = []
    for flag in given:
        value = getattr(args, flag.name)
        if flag.name not in values or _is_same(value, values[flag.name], args=values):
            continue
        spelled = flag.flag if isinstance(value, bool) else f"{flag.flag} {value}"
        found.append(
            f"{spelled} contradicts the checkpoint, whose {flag.name} is {values[flag.name]}: drop "
            "the flag, or use another checkpoint."
        )
    return found


def _is_same(given: Any, value: Any, *, args: Mapping[str, Any]) -> bool:
    if isinstance(given, int) and isinstance(value, list):  # every so many layers have experts
        return [int(layer % max(given, 1) == 0) for layer in range(args["num_layers"])] == value
    return given == value
