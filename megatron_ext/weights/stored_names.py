"""Names of tensors in the files -> the names that the families' tables have.

Three kinds of files differ: those that a wrapper has saved (``module.``, ``_orig_mod.``), those of
transformers 5 with all experts of a layer in one tensor, and tied models saved with the output
layer's name only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ext.weights.operators import Shape
from megatron_ext.weights.weight_files import listed

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
_PEFT = "base_model.model."
_WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.)+|(?<=\.)_orig_mod\.")
_FUSED = re.compile(r"(model\.layers\.\d+\.)mlp\.experts\.(gate_up_proj|down_proj)(?:\.weight)?")
_ROUTER = re.compile(r"(model\.layers\.\d+\.)mlp\.gate\.weight")


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Where a tensor lies: in a file, under a name, perhaps as a part of a larger one."""

    file: Path
    name: str
    shape: Shape
    kind: str
    """safetensors' name of the type."""
    expert: int | None = None
    """Place in a stack of experts; None = it is no stack."""
    first_row: int = 0


def under_known_names(
    stored: Mapping[str, Stored],
    config: Mapping[str, Any],
    *,
    problems: list[str],
    notes: list[str],
) -> dict[str, Stored]:
    """The tensors by the tables' names.

    problems: gets what cannot be told apart.  notes: get what a user should know.
    """
    found = _unwrapped(stored, problems, notes)
    family = config.get("base_model_type", config.get("model_type"))
    found = _single_experts(found, is_mixtral=family == "mixtral")
    if config.get("tie_word_embeddings") is True and OUTPUT in found and EMBEDDING not in found:
        found[EMBEDDING] = found.pop(OUTPUT)
        notes.append(f"{EMBEDDING} is not there: the tied {OUTPUT} is used for both.")
    return found


def _unwrapped(
    stored: Mapping[str, Stored], problems: list[str], notes: list[str]
) -> dict[str, Stored]:
    """Without the prefixes of wrappers."""
    found: dict[str, Stored] = {}
    wrapped, twice = [], []
    for name, place in stored.items():
        short = _WRAPPERS.sub("", name)
        if short != name:
            wrapped.append(name)
        if short in found:
            twice.append(f"{name} and {found[short].name}")
        found[short] = place
    problems += listed(twice, "twice, with and without the prefix of a wrapper. Remove one of them")
    notes += listed(
        wrapped,
        "saved from inside a wrapper (DistributedDataParallel: module., torch.compile: _orig_mod.);"
        " read without the prefix",
    )
    return found


def _single_experts(stored: Mapping[str, Stored], *, is_mixtral: bool) -> dict[str, Stored]:
    """Stacks of all experts, gate above up in each, as one tensor for each matrix."""
    found: dict[str, Stored] = {}
    for name, place in stored.items():
        router = _ROUTER.fullmatch(name) if is_mixtral else None
        fused = _FUSED.fullmatch(name)
        if router:
            found[f"{router[1]}block_sparse_moe.gate.weight"] = place
        elif fused and len(place.shape) == 3:
            found |= _experts_of(place, fused[1], kind=fused[2], is_mixtral=is_mixtral)
        else:
            found[name] = place
    return found


def _experts_of(place: Stored, prefix: str, *, kind: str, is_mixtral: bool) -> dict[str, Stored]:
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    module = "block_sparse_moe" if is_mixtral else "mlp"
    num_experts, rows, width = place.shape
    names = (down,) if kind == "down_proj" else (gate, up)
    size = rows // len(names)
    return {
        f"{prefix}{module}.experts.{expert}.{name}.weight": replace(
            place, shape=(size, width), expert=expert, first_row=number * size
        )
        for expert in range(num_experts)
        for number, name in enumerate(names)
    }


def saved_otherwise(missing: Iterable[str], extra: Iterable[str]) -> list[str]:
    """Why a checkpoint has none of the expected names, where the names that it has tell."""
    found = sorted(extra)
    if not any(True for _ in missing) or not found:
        return []
    if all(name.startswith(_PEFT) for name in found):
        return [
            f"the names begin with {_PEFT}: an adapter (PEFT) around the model. Merge it into the "
            "model first (merge_and_unload)."
        ]
    if any(name.startswith("layers.") for name in found):
        return [
            "the names have no model. in front: saved without its output layer (AutoModel). Save "
            "it again with transformers' AutoModelForCausalLM."
        ]
    return []
