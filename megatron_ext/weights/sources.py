"""Checkpoints as tensors by name, read rectangle by rectangle: safetensors folders and files.

A source knows every tensor's shape and type from the headers alone and reads no value until asked.
Files are mapped into memory and let go again, so that reading a checkpoint of any size holds about
one tensor.  Everything wrong with a folder is listed in one message.
Not covered: PyTorch's pickled checkpoints (they can run code), quantised safetensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_ext.weights.operators import Block, Shape
from megatron_ext.weights.stored_names import Stored, under_known_names
from megatron_ext.weights.weight_files import CONFIG, files_of, listed, read_json

REMAP_BYTES = 256 * 2**20
"""A mapped file is let go after reading this much, as its pages count as used memory until then."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Types that the mapping moves, by safetensors' names."""


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
    def notes(self) -> Sequence[str]:
        """What a user should know of how it is read."""
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
        self.notes: list[str] = []
        stored: dict[str, Stored] = {}
        for file, expected in files_of(path, problems).items():
            _add(stored, file, expected, problems)
        self._stored = under_known_names(stored, self.config, problems=problems, notes=self.notes)
        if problems:
            raise CheckpointError(path, problems)
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(shape=place.shape, dtype=DTYPES.get(place.kind, place.kind))
            for name, place in self._stored.items()
        }
        self._open: tuple[Path, Any] | None = None
        self._bytes_read = 0

    def read(self, block: Block) -> Tensor:
        """The values of a rectangle, mapped from the file: copy them before the next read."""
        info = self.tensors[block.name]
        place = self._stored[block.name]
        try:
            part = self._file(place.file).get_slice(place.name)
            values = _part(part, place, block)
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


def _add(
    stored: dict[str, Stored], file: Path, expected: set[str] | None, problems: list[str]
) -> None:
    """Take up a file's tensors, and compare them with those the index expects there."""
    try:
        with safe_open(file, framework="pt") as opened:
            found = set(opened.keys())
            twice = sorted(found & stored.keys())
            for name in sorted(found):
                part = opened.get_slice(name)
                shape, kind = tuple(part.get_shape()), str(part.get_dtype())
                stored[name] = Stored(file=file, name=name, shape=shape, kind=kind)
    except FileNotFoundError:
        problems.append(f"{file.name} is missing: the index names it. Download it again.")
        return
    except (SafetensorError, OSError) as error:
        problems.append(
            f"{file.name} is truncated or corrupt ({_size(file)}; {error}). Download it again."
        )
        return
    problems += listed(
        twice, f"in {file.name} and in another file as well; download all files of one version"
    )
    problems += listed(
        sorted((expected or set()) - found),
        f"not in {file.name} although the index places them there; download both again",
    )


def _part(part: Any, place: Stored, block: Block) -> Tensor:
    """A block's values from a tensor, or from one expert of a stack."""
    rows, columns = block.rows, block.columns
    if place.expert is None:
        return part[rows] if columns is None else part[rows, columns]
    start, stop, _ = rows.indices(place.shape[0])
    inside = slice(place.first_row + start, place.first_row + max(start, stop))
    columns = slice(None) if columns is None else columns
    return part[place.expert : place.expert + 1, inside, columns][0]


def _size(path: Path) -> str:
    return f"{path.stat().st_size} bytes" if path.is_file() else "not a file"


def blocks_of(name: str, info: TensorInfo, *, max_bytes: int = 64 * 2**20) -> Iterator[Block]:
    """A tensor in row blocks of at most about so many bytes."""
    rows = info.shape[0] if info.shape else 0
    step = max(1, rows * max_bytes // max(info.num_bytes, 1))
    for start in range(0, rows, step):
        yield Block(name=name, rows=slice(start, min(start + step, rows)))
