"""Megatron's checkpoint files without running what they say: tensors and known types only.

``.metadata``, ``common.pt`` and every section of a ``.distcp`` file are pickles, and PyTorch lets
``.metadata`` and the sections that are no tensors call any function.  Inside ``known_types()``
each of them is read against a list of types; anything else is refused by its name before it runs.
Invariant the tests check: no file of a checkpoint makes the process run code.
Not covered: memory that a hostile file asks for, and mistakes in PyTorch's own reader of tensors.
"""

from __future__ import annotations

import pathlib
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from megatron.core.safe_globals import SAFE_GLOBALS, _reconstruct
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint import planner as dcp_planner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from megatron_ext.upstream.patches import Patch, applied

METADATA = ".metadata"
"""PyTorch's file that says where in which file each tensor is."""
_METADATA_TYPES: tuple[type, ...] = (
    dcp_metadata.Metadata,
    dcp_metadata.MetadataIndex,
    dcp_metadata.BytesStorageMetadata,
    dcp_metadata.ChunkStorageMetadata,
    dcp_metadata.TensorStorageMetadata,
    dcp_metadata.TensorProperties,
    dcp_metadata.StorageMeta,
    dcp_metadata._MEM_FORMAT_ENCODING,
    dcp_filesystem._StorageInfo,
    dcp_planner.SavePlan,
    dcp_planner.WriteItem,
    dcp_planner.WriteItemType,
    dcp_planner.TensorWriteData,
    dcp_planner.BytesIOWriteData,
    pathlib.PosixPath,
    torch.Size,
)
"""What PyTorch and Megatron write to ``.metadata``."""
_METADATA_NAMES = {(kind.__module__, kind.__qualname__): kind for kind in _METADATA_TYPES} | {
    ("pathlib._local", "PosixPath"): pathlib.PosixPath  # Python 3.13's name
}
_KNOWN_TYPES = [
    *SAFE_GLOBALS,
    (_reconstruct, "numpy.core.multiarray._reconstruct"),  # numpy 1's name
]
"""Megatron's list of what is saved beside tensors: arguments, their enums, arrays of random states.

PyTorch adds tensors and plain containers."""
_REFUSALS = (
    re.compile(r"GLOBAL (\S+)"),
    re.compile(r"(?:unrecognized function|but got) (.+)"),
    re.compile(r"(TorchScript)"),
    re.compile(r"(legacy \.tar)"),
)
"""How PyTorch names what it does not read when only tensors and known types are asked for."""
_UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)
"""What reading damaged files raises."""


class DamagedCheckpointError(ValueError):
    """A file of a checkpoint is missing or cannot be read; an older checkpoint may be intact."""


class UnsafeCheckpointError(ValueError):
    """A file asks for more than tensors and known types; nothing of it has run."""


class _UnknownNameError(pickle.UnpicklingError):
    """A name that is not on the list."""


class _MetadataUnpickler(pickle.Unpickler):
    """Reads ``.metadata``; C code apart from the look-up of names."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """The type of that name, if it is on the list."""
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        if (module_name, global_name) == ("torch.serialization", "_get_layout"):
            return lambda name: torch.serialization._get_layout(
                name
            )  # one of its own to be changed
        found = _METADATA_NAMES.get((module_name, global_name))
        if found is None:
            raise _UnknownNameError(f"{module_name}.{global_name}")
        return found


def read_metadata(folder: Path) -> Metadata:
    """What ``.metadata`` of a checkpoint folder says.

    Raises:
        DamagedCheckpointError: it is missing or cannot be read.
        UnsafeCheckpointError: it names a type or function that is not on the list, or a file
            outside the folder.
    """
    path = folder / METADATA
    own = {kind: dict(vars(kind)) for kind in _METADATA_TYPES}
    with reading(path), path.open("rb") as file:
        try:
            metadata = _MetadataUnpickler(file).load()
        except _UnknownNameError as error:
            raise UnsafeCheckpointError(_refusal(path, str(error))) from None
        finally:
            changed = [kind for kind, values in own.items() if _put_back(kind, values)]
        if changed:
            raise UnsafeCheckpointError(_refusal(path, f"a change of {changed[0].__qualname__}"))
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds a {type(metadata).__name__}")
        names = [place.relative_path for place in metadata.storage_data.values()]
        dict(metadata.state_dict_metadata)
    outside = [name for name in names if name in ("", "..") or Path(name).name != name]
    if outside:
        raise UnsafeCheckpointError(_refusal(path, f"the file {outside[0]!r}"))
    return metadata


class KnownTypesReader(FileSystemReader):
    """PyTorch's reader, which unpickles known types only and names the file it cannot read."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """See `read_metadata` of this file."""
        metadata = read_metadata(Path(self.path))
        storage = getattr(metadata, "storage_meta", None) or StorageMeta()
        storage.load_id = self.load_id
        metadata.storage_meta = storage
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read a plan's tensors and objects, file by file."""
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            with known_types(), reading(Path(self.path) / name):
                super().read_data(LoadPlan(items), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done


@contextmanager
def known_types() -> Iterator[None]:
    """Whatever Megatron or PyTorch reads of checkpoints in the block, it reads known types only.

    So does every other thread while the block lasts.
    """
    before = torch.serialization.get_safe_globals()
    with applied(_PATCHES):
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(_KNOWN_TYPES)
        try:
            yield
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(before)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What goes wrong in the block is said of this file.

    Raises:
        DamagedCheckpointError: it is missing or cannot be read.
        UnsafeCheckpointError: it asks for a type or function that is not on the list.
    """
    try:
        yield
    except (DamagedCheckpointError, UnsafeCheckpointError):
        raise
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{path} is missing") from error
    except _UNREADABLE as error:
        refused = [found[1] for text in _REFUSALS if (found := text.search(str(error)))]
        if refused:
            raise UnsafeCheckpointError(_refusal(path, refused[0])) from None
        kind = error.strerror if isinstance(error, OSError) else type(error).__name__
        raise DamagedCheckpointError(f"{path} cannot be read ({kind})") from error


_torch_load = torch.load


def _load_known(
    f: Any,
    map_location: Any = None,
    pickle_module: Any = None,
    *,
    weights_only: bool | None = None,
    mmap: bool | None = None,
    **pickle_load_args: Any,
) -> Any:
    """``torch.load`` of tensors and known types, whatever the caller asks for."""
    options = {"map_location": map_location, "mmap": mmap, **pickle_load_args}
    if isinstance(f, str | PathLike):
        with reading(Path(f)):
            return _torch_load(f, weights_only=True, **options)
    return _torch_load(f, weights_only=True, **options)


_PATCHES = (
    Patch(
        target="torch:load",
        replacement=_load_known,
        params=("f", "map_location", "pickle_module", "weights_only", "mmap", "pickle_load_args"),
        why="PyTorch's load planner asks for weights_only=False, and an environment variable makes "
        "it the default: the sections of objects can run any function",
        remove_when="DefaultLoadPlanner.load_bytes and Megatron's load_common ask for weights_only",
    ),
    Patch(
        target="megatron.core.dist_checkpointing.strategies.torch:FileSystemReader",
        replacement=KnownTypesReader,
        params=None,
        why="FileSystemReader.read_metadata unpickles .metadata, which can run any function",
        remove_when="PyTorch reads .metadata without unpickling arbitrary types",
    ),
)


def _put_back(kind: type, values: Mapping[str, Any]) -> bool:
    """Undo what unpickling has set on a class itself; whether there was anything."""
    now = dict(vars(kind))
    added = now.keys() - values.keys()
    changed = {name for name, value in values.items() if now.get(name) is not value}
    for name in added:
        delattr(kind, name)
    for name in changed:
        setattr(kind, name, values[name])
    return bool(added or changed)


def _refusal(path: Path, name: str) -> str:
    return (
        f"{path} asks for {name} when it is read. A checkpoint consists of tensors and a few known "
        "types; anything else could run code, so nothing was loaded. Use a checkpoint whose source "
        "you trust; if this one is yours, load it where it was saved and save it without that."
    )
