"""Megatron's ``torch_dist`` files one tensor at a time, without a model or a process group.

Megatron and PyTorch hold all of a rank's tensors when they write; here one is held, so that a model
of any size is converted on a small machine.  Keys and files are those Megatron writes for one rank,
whatever the layout that loads them.
Invariant the tests check: Megatron loads what is written here on any layout, and what Megatron
wrote on any layout is read here, bit for bit.
Not covered: optimizer states, FP8.  The names for Transformer Engine are not tested without a GPU.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_ext.upstream.checkpoint_files import names_in, record_of, write_checksums
from megatron_ext.upstream.checkpoint_pickles import (
    METADATA,
    DamagedCheckpointError,
    KnownTypesReader,
)
from megatron_ext.weights.architecture import Architecture
from megatron_ext.weights.operators import Shape
from megatron_ext.weights.table import Parameter

Implementation = Literal["local", "transformer_engine"]
"""Whose layers the model has; they name some norms differently."""

_FILE = "__0_0.distcp"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(.+)")
_FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
"""Norms that can be saved as part of the layer behind them."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a checkpoint has a parameter: in the tensor ``key``, which may stack several."""

    key: str
    index: Shape = ()
    """Layer and expert within the stack; () = no stack."""
    stack: Shape = ()
    """Layers and experts in the stack."""

    def offsets(self, shape: Shape) -> torch.Size:
        """Where a parameter of this shape starts in the tensor."""
        return torch.Size((*self.index, *(0 for _ in shape)))

    def chunk(self, shape: Shape) -> ChunkStorageMetadata:
        """The part of the tensor that the parameter is."""
        sizes = torch.Size((*(1 for _ in self.index), *shape))
        return ChunkStorageMetadata(offsets=self.offsets(shape), sizes=sizes)


def place_of(
    parameter: Parameter, architecture: Architecture, *, implementation: Implementation
) -> Place:
    """Where Megatron saves a parameter of a model that hf_config describes.

    Layers are stacked if all are of one kind: Megatron does it when --moe-layer-freq is no list.
    """
    match = _LAYER.fullmatch(parameter.name)
    if match is None:
        return Place(key=parameter.name)
    layer, name = int(match[1]), match[2]
    if _is_fused(name, architecture, layer=layer, implementation=implementation):
        name = _FUSED[name]
    is_stacked = architecture.experts is None
    return _in_layers(name, architecture, layer=layer, is_stacked=is_stacked)


def places_of(parameter: Parameter, architecture: Architecture) -> list[Place]:
    """Every place that some layout and implementation of Megatron's saves a parameter in."""
    match = _LAYER.fullmatch(parameter.name)
    if match is None:
        return [Place(key=parameter.name)]
    names = [match[2], *([_FUSED[match[2]]] if match[2] in _FUSED else [])]
    return [
        _in_layers(name, architecture, layer=int(match[1]), is_stacked=is_stacked)
        for name in names
        for is_stacked in (False, True)
    ]


def _in_layers(name: str, architecture: Architecture, *, layer: int, is_stacked: bool) -> Place:
    index, stack = ((layer,), (architecture.num_layers,)) if is_stacked else ((), ())
    expert = _EXPERT.fullmatch(name)
    if expert:
        assert architecture.experts is not None, f"{name} in a model without experts"
        name = f"mlp.experts.experts.{expert[2]}"
        index = (*index, int(expert[1]))
        stack = (*stack, architecture.experts.num_experts)
    prefix = "decoder.layers." if is_stacked else f"decoder.layers.{layer}."
    return Place(key=prefix + name, index=index, stack=stack)


def _is_fused(
    name: str, architecture: Architecture, *, layer: int, implementation: Implementation
) -> bool:
    is_latent = architecture.latent is not None
    if implementation == "local":
        return not is_latent and name in ("input_layernorm.weight", "pre_mlp_layernorm.weight")
    if name == "pre_mlp_layernorm.weight":
        return not architecture.sparse_layers[layer]
    return name in _FUSED and is_latent == (name != "input_layernorm.weight")


class TorchDistWriter:
    """Writes one checkpoint folder, tensor by tensor; it is complete after ``finish``.

    Every module with a weight also gets the empty extra state that Megatron's layers ask for.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True)
        self._file = (folder / _FILE).open("wb")
        self._contents: dict[str, Any] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}

    def add(self, place: Place, values: Tensor) -> None:
        """Write one parameter."""
        shape = tuple(values.shape)
        chunk = place.chunk(shape)
        entry = self._contents.setdefault(
            place.key,
            TensorStorageMetadata(
                properties=TensorProperties(dtype=values.dtype),
                size=torch.Size((*place.stack, *shape)),
                chunks=[],
            ),
        )
        index = MetadataIndex(place.key, chunk.offsets, len(entry.chunks))
        entry.chunks.append(chunk)
        self._append(index, values.reshape(chunk.sizes))
        module, _, kind = place.key.rpartition(".")
        if kind == "weight":
            self._add_empty_state(module, place)
        if module.endswith("self_attention.linear_proj") and kind == "weight":
            self._add_empty_state(module.replace("linear_proj", "core_attention"), place)

    def finish(self, common: dict[str, Any]) -> None:
        """Write what is saved beside tensors, then the metadata and checksums.

        common: for Megatron's ``load_common_state_dict``.
        """
        self._add_object("common_state/shard_0_1", common)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        metadata = Metadata(
            state_dict_metadata=self._contents,
            storage_data=self._storage,
            storage_meta=StorageMeta(),
            version=CURRENT_DCP_VERSION,
        )
        _write(self._folder / METADATA, pickle.dumps(metadata))
        kind = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        _write(self._folder / "metadata.json", json.dumps(kind).encode())
        names = names_in(self._folder)
        write_checksums(self._folder, {name: record_of(self._folder / name) for name in names})

    def close(self) -> None:
        """Let go of the file, also of an unfinished one."""
        self._file.close()

    def _add_empty_state(self, module: str, place: Place) -> None:
        index, stack = place.index or (0,), place.stack or (1,)
        shard = f"{'.'.join(map(str, index))}_{'.'.join(map(str, stack))}"
        self._add_object(f"{module}._extra_state/shard_{shard}", None)

    def _add_object(self, key: str, value: Any) -> None:
        self._contents[key] = BytesStorageMetadata()
        self._append(MetadataIndex(key), [value])

    def _append(self, index: MetadataIndex, value: Any) -> None:
        start = self._file.tell()
        torch.save(value, self._file)
        self._storage[index] = _StorageInfo(_FILE, start, self._file.tell() - start)


class TorchDistReader:
    """Reads the weights of one checkpoint folder, tensor by tensor.

    Raises:
        ValueError: its metadata cannot be read, or is not to be trusted.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = KnownTypesReader(folder)
        self._metadata = self._files.read_metadata()
        self._files.set_up_storage_reader(self._metadata, is_coordinator=True)

    def info(self, place: Place) -> tuple[Shape, torch.dtype] | None:
        """Shape of a parameter there, and its type; None if the checkpoint has none."""
        entry = self._metadata.state_dict_metadata.get(place.key)
        if not isinstance(entry, TensorStorageMetadata):
            return None
        depth = len(place.stack)
        if tuple(entry.size[:depth]) != place.stack:
            return None
        return tuple(entry.size[depth:]), entry.properties.dtype

    def read(self, place: Place) -> Tensor:
        """A whole parameter, put together from the parts that ranks have saved.

        Raises:
            ValueError: it cannot be read, or is not to be trusted.
        """
        found, entry = self.info(place), self._metadata.state_dict_metadata[place.key]
        assert found is not None, f"{place.key} is not there"
        assert isinstance(entry, TensorStorageMetadata), f"{place.key} is no tensor"
        shape, dtype = found
        chunk = place.chunk(shape)
        target = torch.empty(chunk.sizes, dtype=dtype)
        items = create_read_items_for_chunk_list(place.key, entry, [chunk])
        try:
            self._files.read_data(LoadPlan(items), _Into(target)).wait()
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(
                f"{error}, where {place.key} is. Copy the checkpoint again, or use another one."
            ) from error
        num_read = sum(item.lengths.numel() for item in items)
        if num_read != target.numel():
            raise ValueError(
                f"{place.key} in {self.folder} has {num_read} of {target.numel()} values. A part "
                "of the checkpoint is missing: copy it again, or use another one."
            )
        return target.reshape(shape)


class _Into(DefaultLoadPlanner):
    """Puts what is read into one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        starts, sizes = read_item.dest_offsets, read_item.lengths
        region = tuple(slice(s, s + n) for s, n in zip(starts, sizes, strict=True))
        return self._target[region]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError(f"{read_item.storage_index.fqn} is no tensor")


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
