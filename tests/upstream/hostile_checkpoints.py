"""Checkpoints that run code when they are unpickled: the code leaves a file behind."""

from __future__ import annotations

import builtins
import importlib
import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from megatron_ext.upstream.checkpoint_folder import TRACKER, folder_of

COMMON = "common_state/shard_0_1"
DATA = "__0_0.distcp"


class Reduced:
    """Something that unpickles as the result of a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.parts = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        """The call."""
        return self.parts

    def __call__(self) -> None:
        """Only what can be called is accepted as a function."""


def payloads(mark: Path) -> dict[str, Any]:
    """Name that is to be refused -> an object that makes the file ``mark`` when it is read."""
    imported = Reduced(importlib.import_module, "os")
    return {
        "posix.system": Reduced(os.system, f"touch {mark}"),
        "builtins.eval": Reduced(builtins.eval, f"open({str(mark)!r}, 'w').close()"),
        "builtins.getattr": Reduced(Reduced(getattr, imported, "system"), f"touch {mark}"),
    }


def as_zip(value: Any) -> bytes:
    """What ``torch.save`` writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def as_legacy(value: Any) -> bytes:
    """What ``torch.save`` wrote before PyTorch 1.6: five pickles one after another."""
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def program() -> bytes:
    """A TorchScript program, which ``torch.load`` would hand to ``torch.jit.load``."""
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Identity()), buffer)
    return buffer.getvalue()


def metadata_of(folder: Path) -> Metadata:
    """The metadata of a checkpoint of ours."""
    return pickle.loads((folder / ".metadata").read_bytes())


def with_metadata(folder: Path, value: Any) -> None:
    """Give a folder other metadata."""
    (folder / ".metadata").write_bytes(pickle.dumps(value))


def with_section(folder: Path, key: str, content: bytes) -> None:
    """Give an entry another content, at the end of its file."""
    metadata = metadata_of(folder)
    assert metadata.storage_data is not None
    [index] = [index for index in metadata.storage_data if index.fqn == key][:1]
    with (folder / DATA).open("ab") as file:
        start = file.tell()
        file.write(content)
    metadata.storage_data[index] = _StorageInfo(DATA, start, len(content))
    with_metadata(folder, metadata)


def copied(folder: Path, root: Path) -> Path:
    """A copy of a checkpoint as step 2 of a run of its own, without checksums; its folder."""
    copy = folder_of(root, 2)
    shutil.copytree(folder, copy)
    (root / TRACKER).write_text("2")
    (copy / "checksums.json").unlink(missing_ok=True)
    return copy


def hostile(folder: Path, root: Path, mark: Path) -> dict[str, tuple[Path, str, str]]:
    """Case -> (folder of a run, file, name): what a user could be given, by where the code is."""
    names = payloads(mark)
    system, nested = names["posix.system"], names["builtins.getattr"]
    weight = "decoder.layers.mlp.linear_fc2.weight"
    found: dict[str, tuple[Path, str, str]] = {}

    def add(case: str, change: Callable[[Path], object], file: str, name: str) -> None:
        change(copied(folder, root / case))
        found[case] = (root / case, file, name)

    for name, value in names.items():
        add(f"metadata {name}", lambda f, v=value: with_metadata(f, v), ".metadata", name)
        add(f"common {name}", lambda f, v=value: _in_common(f, as_zip, v), DATA, name)
    add("metadata inside", lambda f: _inside_metadata(f, system), ".metadata", "posix.system")
    add("metadata class", _changed_class, ".metadata", "a change of Metadata")
    add("metadata path", _path_outside, ".metadata", "the file '../__0_0.distcp'")
    add("common legacy", lambda f: _in_common(f, as_legacy, system), DATA, "posix.system")
    add("common program", lambda f: with_section(f, COMMON, program()), DATA, "TorchScript")
    add("weight", lambda f: with_section(f, weight, as_zip(system)), DATA, "posix.system")
    add("weight legacy", lambda f: with_section(f, weight, as_legacy(nested)), DATA, "getattr")
    for kind, content in {"": as_zip(system), " legacy": as_legacy(nested)}.items():
        name = "posix.system" if not kind else "getattr"
        add(f"common.pt{kind}", lambda f, c=content: _common_file(f, c), "common.pt", name)
    return found


def _in_common(folder: Path, write: Callable[[Any], bytes], value: Any) -> None:
    with_section(folder, COMMON, write([{"args": value}]))


def _inside_metadata(folder: Path, value: Any) -> None:
    metadata = metadata_of(folder)
    metadata.planner_data = {"plan": value}
    with_metadata(folder, metadata)


def _changed_class(folder: Path) -> None:
    """``BUILD`` on a class sets its attributes."""
    text = pickle.dumps(Metadata, 2).removesuffix(b".").removeprefix(b"\x80\x02")
    state = pickle.dumps((None, {"__call__": 1}), 2).removesuffix(b".").removeprefix(b"\x80\x02")
    (folder / ".metadata").write_bytes(b"\x80\x02" + text + state + b"b.")


def _path_outside(folder: Path) -> None:
    metadata = metadata_of(folder)
    assert metadata.storage_data is not None
    for place in metadata.storage_data.values():
        place.relative_path = f"../{DATA}"
    with_metadata(folder, metadata)


def _common_file(folder: Path, content: bytes) -> None:
    (folder / "common.pt").write_bytes(content)
