"""Checkpoints as tensors by name, read rectangle by rectangle: safetensors folders and files.

A source knows every tensor's shape and type from the headers alone and reads no value until asked.
Files are mapped into memory and let go again, so that reading a checkpoint of any size holds about
one tensor.  Everything wrong with a folder is listed in one message.
Not covered: PyTorch's pickled checkpoints (they can run code), quantised safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_ext.weights.operators import Block, Shape

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
REMAP_BYTES = 256 * 2**20
"""A mapped file is let go after reading this much, as its pages count as used memory until then."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Types that the mapping moves, by safetensors' names."""
SHOWN = 8
"""Names listed of a group of like problems; the rest are counted."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: all that is wrong with it, and the remedies."""

    def __init__(self, location: Path | str, problems: list[str]) -> None:
        super().__init__("\n  ".join([f"{location} cannot be used:", *problems]))
        self.problems = problems


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """What a header says of a tensor."""

    shape: Shape
    dtype: torch.dtype | str
    """A string names a type that cannot be moved, such as FP8."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""
        if isinstance(self.dtype, str):
            return 0
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class TensorSource(Protocol):
    """A checkpoint that can be read."""

    @property
    def location(self) -> Path:
        """Its path."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """The fields of its config.json, or what stands for it."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Its tensors by Hugging Face's names."""
        ...

    def read(self, block: Block) -> Tensor:
        """The values of a rectangle.  Raises CheckpointError if they cannot be read."""
        ...

    def close(self) -> None:
        """Let go of the files."""
        ...


class SafetensorsSource:
    """A folder of safetensors files with its config.json, or one such file beside it.

    Raises:
        CheckpointError: something is missing, corrupt or contradictory.
    """

    def __init__(self, path: Path) -> None:
        self.location = path
        folder = path if path.is_dir() else path.parent
        problems: list[str] = []
        self.config = read_json(folder / CONFIG, problems)
        self.tensors: dict[str, TensorInfo] = {}
        self._files: dict[str, Path] = {}
        for file, expected in _files_of(path, problems).items():
            self._add(file, expected, problems)
        if problems:
            raise CheckpointError(path, problems)
        self._open: tuple[Path, Any] | None = None
        self._bytes_read = 0

    def _add(self, file: Path, expected: set[str] | None, problems: list[str]) -> None:
        """Take up a file's tensors: those the index expects there, or all."""
        try:
            with safe_open(file, framework="pt") as opened:
                found = set(opened.keys())
                for name in sorted(found if expected is None else found & expected):
                    part = opened.get_slice(name)
                    kind = str(part.get_dtype())
                    self.tensors[name] = TensorInfo(
                        shape=tuple(part.get_shape()), dtype=DTYPES.get(kind, kind)
                    )
                    self._files[name] = file
        except FileNotFoundError:
            problems.append(f"{file.name} is missing: the index names it. Download it again.")
            return
        except (SafetensorError, OSError) as error:
            problems.append(
                f"{file.name} is truncated or corrupt ({_size(file)}; {error}). Download it again."
            )
            return
        if expected is not None:
            problems += listed(
                sorted(expected - found),
                f"not in {file.name} although the index places them there; download both again",
            )

    def read(self, block: Block) -> Tensor:
        """The values of a rectangle, mapped from the file: copy them before the next read."""
        info = self.tensors[block.name]
        rows, columns = block.rows, block.columns
        try:
            part = self._file(self._files[block.name]).get_slice(block.name)
            values = part[rows] if columns is None else part[rows, columns]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                self.location,
                [f"{block.name} cannot be read ({error}). Download the checkpoint again."],
            ) from error
        assert not isinstance(info.dtype, str), f"{block.name}: the checks refuse {info.dtype}"
        self._bytes_read += values.numel() * values.element_size()
        return values

    def _file(self, path: Path) -> Any:
        if self._open is None or self._open[0] != path or self._bytes_read > REMAP_BYTES:
            self.close()
            self._open = path, safe_open(path, framework="pt").__enter__()
        return self._open[1]

    def close(self) -> None:
        """Let go of the mapped file."""
        if self._open is not None:
            self._open[1].__exit__(None, None, None)
        self._open, self._bytes_read = None, 0


def read_json(path: Path, problems: list[str]) -> dict[str, Any]:
    """A JSON object from a file; {} and a problem if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(f"{path.name} is missing in {path.parent}. Copy it there.")
        return {}
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} is no readable JSON ({error}). Download it again.")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name} is not a JSON object. Download it again.")
        return {}
    return value


def _files_of(path: Path, problems: list[str]) -> dict[Path, set[str] | None]:
    """The files to read, and the tensors that an index expects in each (None = all it has)."""
    if path.is_file():
        return {path: None}
    if not path.is_dir():
        problems.append("there is no such file or folder. Check the path.")
        return {}
    if (path / INDEX).is_file():
        return _files_of_index(path, problems)
    if (path / SINGLE).is_file():
        return {path / SINGLE: None}
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1 and not (path / "adapter_config.json").is_file():
        return {files[0]: None}
    problems.append(_why_no_files(path, num_files=len(files)))
    return {}


def _why_no_files(path: Path, *, num_files: int) -> str:
    if (path / "adapter_config.json").is_file():
        return "this is an adapter (LoRA), not a model. Merge it into its base model first."
    if num_files:
        return f"{num_files} safetensors files but no {INDEX}. Download the index too."
    if any(path.glob("*.bin")) or any(path.glob("*.pt*")):
        return (
            "only pickled weights (.bin, .pt), which can run code when read. Save the model again "
            "as safetensors with transformers."
        )
    if any(path.glob("*.gguf")):
        return "no safetensors but a GGUF file. Give the path of that file itself."
    return f"no {SINGLE} and no {INDEX}. Check the path, or download the weights."


def _files_of_index(path: Path, problems: list[str]) -> dict[Path, set[str] | None]:
    weight_map = read_json(path / INDEX, problems).get("weight_map")
    is_map = isinstance(weight_map, dict) and all(isinstance(f, str) for f in weight_map.values())
    if not is_map or not weight_map:
        problems.append(f"{INDEX} has no weight_map. Download it again.")
        return {}
    outside = sorted({f for f in weight_map.values() if Path(f).name != f or f in ("", ".", "..")})
    if outside:
        problems += listed(outside, f"named in {INDEX}, are not files beside it; correct the index")
        return {}
    files: dict[Path, set[str] | None] = {}
    for name, file in sorted(weight_map.items(), key=lambda item: (item[1], item[0])):
        expected = files.setdefault(path / file, set())
        assert expected is not None
        expected.add(name)
    return files


def listed(names: list[str], what: str) -> list[str]:
    """One line for any number of names with the same problem; none for no names."""
    if not names:
        return []
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return [f"{', '.join(names[:SHOWN])}{more}: {what}."]


def _size(path: Path) -> str:
    return f"{path.stat().st_size} bytes" if path.is_file() else "not a file"


def blocks_of(name: str, info: TensorInfo, *, max_bytes: int = 64 * 2**20) -> Iterator[Block]:
    """A tensor in row blocks of at most about so many bytes."""
    rows = info.shape[0] if info.shape else 0
    step = max(1, rows * max_bytes // max(info.num_bytes, 1))
    for start in range(0, rows, step):
        yield Block(name=name, rows=slice(start, min(start + step, rows)))
