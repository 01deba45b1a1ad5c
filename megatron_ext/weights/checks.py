"""Opening a checkpoint of any kind, and all that is wrong with it, at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ext.weights.architecture import Architecture
from megatron_ext.weights.families import FAMILIES, architecture_of, parameters, read_config
from megatron_ext.weights.gguf_source import GgufSource
from megatron_ext.weights.operators import Block, Shape
from megatron_ext.weights.sources import (
    CheckpointError,
    SafetensorsSource,
    TensorInfo,
    TensorSource,
    blocks_of,
)
from megatron_ext.weights.stored_names import EMBEDDING, OUTPUT, saved_otherwise
from megatron_ext.weights.weight_files import listed

MAX_MISSING = 1000
"""Missing tensors after which the comparison stops: the sizes in config.json are wrong then."""
_HARMLESS = re.compile(r".*\.rotary_emb\.inv_freq|rope_freqs\.weight")
"""Tensors of old checkpoints that are computed, not trained."""
_MTP = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An opened checkpoint whose tensors are those of its architecture."""

    source: TensorSource
    config: Mapping[str, Any]
    """The fields of its config.json, corrected where the tensors say otherwise."""
    architecture: Architecture
    notes: tuple[str, ...]
    """What a user should know: corrections, and tensors that are not used."""


def open_source(path: Path) -> TensorSource:
    """Open a folder of safetensors, one safetensors file, or a GGUF file.

    Raises:
        CheckpointError: it cannot be read.
    """
    return GgufSource(path) if path.suffix == ".gguf" else SafetensorsSource(path)


def open_checkpoint(path: Path, *, drop_mtp: bool = False) -> Checkpoint:
    """Open a checkpoint and check names, shapes and types of all its tensors.

    drop_mtp: leave out multi-token-prediction layers, which are refused otherwise.

    Raises:
        CheckpointError: it cannot be read or is not what its config.json says.
    """
    source = open_source(path)
    try:
        architecture, unused = read_config(source.config)
    except ValueError as error:
        raise CheckpointError(path, [str(error)]) from error
    config, notes = source.config, list(source.notes)
    notes += listed(unused, f"fields of config.json that a {architecture.family} has not; not used")
    if architecture.tied and OUTPUT in source.tensors and not _is_output_the_embedding(source):
        config = {**config, "tie_word_embeddings": False}
        architecture = replace(architecture, tied=False)
        notes.append(
            f"config.json says tie_word_embeddings, but {OUTPUT} is not {EMBEDDING}: both are "
            "used, as transformers does. Write tie_word_embeddings false into config.json."
        )
    problems = tensor_problems(source.tensors, architecture, drop_mtp=drop_mtp)
    if problems:
        raise CheckpointError(path, problems)
    dropped = sorted(_mtp_tensors(source.tensors, architecture))
    notes += listed(dropped, "left out (--drop-mtp-layers)")
    return Checkpoint(source=source, config=config, architecture=architecture, notes=tuple(notes))


def _is_output_the_embedding(source: TensorSource) -> bool:
    """Whether the output layer's own tensor has the embedding's values."""
    output, embedding = source.tensors[OUTPUT], source.tensors.get(EMBEDDING)
    if embedding is None or isinstance(output.dtype, str) or isinstance(embedding.dtype, str):
        return True  # the checks of all tensors say what is wrong
    if output.shape != embedding.shape:
        return False

    def values(block: Block) -> Tensor:
        return source.read(block).to(torch.float64, copy=True)  # reads are valid until the next

    return all(
        torch.equal(values(block), values(replace(block, name=EMBEDDING)))
        for block in blocks_of(OUTPUT, output)
    )


def tensor_shapes(architecture: Architecture) -> Iterator[tuple[str, Shape]]:
    """Every tensor of a checkpoint and its shape, in the order they are written."""
    for parameter in parameters(architecture):
        if not parameter.is_copy:
            yield from parameter.operator.tensors().items()


def tensor_problems(
    tensors: Mapping[str, TensorInfo], architecture: Architecture, *, drop_mtp: bool = False
) -> list[str]:
    """Missing, extra, misshapen tensors and types that cannot be moved, one line a kind."""
    missing, misshapen, extra = [], [], set(tensors)
    for name, shape in tensor_shapes(architecture):
        extra.discard(name)
        if name not in tensors:
            missing.append(name)
            if len(missing) == MAX_MISSING:
                break
        elif tensors[name].shape != shape:
            misshapen.append(f"{name} is {list(tensors[name].shape)}, not {list(shape)}")
    ignored = _ignored(extra, architecture, drop_mtp=drop_mtp)
    extra -= ignored
    typed = [f"{n} ({i.dtype})" for n, i in tensors.items() if isinstance(i.dtype, str)]
    problems = listed(missing, "missing. Download the checkpoint again, or correct config.json")
    problems += listed(misshapen, "the shapes do not fit config.json. Correct the sizes there")
    if len(missing) < MAX_MISSING:
        problems += _extra_problems(sorted(extra), architecture)
    problems += listed(typed, "types that are not plain numbers. Dequantise the checkpoint first")
    problems += saved_otherwise(missing, extra)
    other = None if architecture.converted else _other_family(tensors, architecture)
    if problems and other:
        problems.append(
            f"the tensor names are those of a {other}, but config.json says "
            f"{architecture.family}. Use the config.json that belongs to the weights."
        )
    return problems


def _ignored(extra: set[str], architecture: Architecture, *, drop_mtp: bool) -> set[str]:
    """Tensors that may be there without a use."""
    found = {name for name in extra if _HARMLESS.fullmatch(name)}
    if architecture.tied:
        found |= extra & {OUTPUT}
    return found | (_mtp_tensors(extra, architecture) if drop_mtp else set())


def _mtp_tensors(names: Iterable[str], architecture: Architecture) -> set[str]:
    """Tensors of layers behind the last one: they predict further tokens."""
    matches = ((name, _MTP.match(name)) for name in names)
    return {
        name
        for name, match in matches
        if match and int(match[1]) >= architecture.num_layers and architecture.latent is not None
    }


def _extra_problems(extra: list[str], architecture: Architecture) -> list[str]:
    mtp = _mtp_tensors(extra, architecture)
    problems = listed(
        [name for name in extra if name not in mtp],
        f"not part of a {architecture.family}. Correct config.json, or remove them",
    )
    problems += listed(
        sorted(mtp),
        "multi-token-prediction layers, which are not trained. Ask to drop them "
        "(--drop-mtp-layers) to go on without",
    )
    return problems


def _other_family(tensors: Iterable[str], architecture: Architecture) -> str | None:
    """The family whose table names the tensors best, if it is another one."""
    kinds = {_kind(name) for name in tensors}
    families = {name: _kinds(name) for name in FAMILIES}
    share = {name: len(kinds & own) / len(kinds | own) for name, own in families.items()}
    best = max(share, key=lambda name: share[name])
    return best if share[best] > share[architecture.family] else None


def _kinds(family: str) -> set[str]:
    """Names of a family's tensors with the layer and expert left out, by a tiny model of it."""
    tiny = {
        "model_type": family,
        "vocab_size": 2,
        "hidden_size": 64,
        "intermediate_size": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_experts_per_tok": 1,
        "first_k_dense_replace": 1,
        "mlp_only_layers": [0],
    }
    return {_kind(name) for name, _ in tensor_shapes(architecture_of(tiny))}


def _kind(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "#", name)


class FiniteReader:
    """Reads a source, and keeps the names of tensors that had a NaN or an infinity.

    So that values are looked at on their only way through memory, and all problems are told at the
    end.
    """

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._bad: dict[str, None] = {}

    def __call__(self, block: Block) -> Tensor:
        """The values of a block."""
        values = self._source.read(block)
        if not torch.isfinite(values).all():
            self._bad[block.name] = None
        return values

    def problems(self) -> list[str]:
        """What was wrong with all that was read so far."""
        return not_finite(list(self._bad))


def not_finite(names: list[str]) -> list[str]:
    """The problem of tensors that have a NaN or an infinity; none for no names."""
    return listed(
        names,
        "NaN or infinite values. The training that wrote them diverged, or the "
        "file is damaged: use another checkpoint",
    )
