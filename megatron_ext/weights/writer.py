"""Checkpoints in Hugging Face's layout, written tensor by tensor and moved into place at the end.

Names, shapes and types are known before the first value, so the safetensors headers are written
first and values follow as they come: no more than one tensor is held.  All goes into a folder
beside the target, named ``.partial``, which gets its name at the very end.  An interrupted writer
therefore leaves nothing that looks complete, and the next one starts over.
Invariant the tests check: safetensors and transformers read back what was written, bit for bit.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from megatron_ext.weights.sources import DTYPES, TensorInfo
from megatron_ext.weights.weight_files import CONFIG, INDEX, SINGLE

PARTIAL = ".partial"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""Files that go with the weights unchanged."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class CheckpointWriter:
    """Writes one checkpoint folder.

        with CheckpointWriter(folder, tensors=tensors, config=config) as writer:
            for name, values in ...:            # in the order of ``tensors``
                writer.add(name, values)

    Leaving the block after all tensors moves the folder into place; after an exception, removes it.

    Args:
        tensors: name, shape and type of every tensor, in the order they will come.
        config: the fields of config.json; ``dtype`` is set to the type most values have.
        tokenizer: folder to copy the tokenizer's files from; None = none.
        max_file_bytes: a file is closed when the next tensor would make it larger.

    Raises:
        ValueError: the target exists, or the disk has not the space; nothing is written then.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tensors: Mapping[str, TensorInfo],
        config: Mapping[str, Any],
        tokenizer: Path | None = None,
        max_file_bytes: int = 5 * 10**9,
    ) -> None:
        self.folder = folder
        self._tensors = tensors
        self._config = dict(config)
        self._tokenizer = tokenizer
        self._partial = folder.with_name(folder.name + PARTIAL)
        self._plan = _files_of(tensors, max_file_bytes=max_file_bytes)
        self._left = iter([(file, name) for file, names in self._plan.items() for name in names])
        self._file: BinaryIO | None = None
        self._check_target()

    @property
    def num_bytes(self) -> int:
        """Bytes of all values."""
        return sum(info.num_bytes for info in self._tensors.values())

    def _check_target(self) -> None:
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise ValueError(
                f"{self.folder} exists and is not empty. Give another folder, or delete it first."
            )
        parent = _existing(self.folder)
        free = shutil.disk_usage(parent).free
        if free < self.num_bytes:
            raise ValueError(
                f"{self.folder} needs {self.num_bytes / 1e9:.2f} GB and {parent} has "
                f"{free / 1e9:.2f} GB free. Free some space, or give a folder on another disk."
            )

    def __enter__(self) -> Self:
        with self._explained():
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir(parents=True)
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        try:
            if kind is None:
                with self._explained():
                    self._finish()
        finally:
            if self._file is not None:
                self._file.close()
            shutil.rmtree(self._partial, ignore_errors=True)

    def add(self, name: str, values: Tensor) -> None:
        """Write the next tensor, converted to the type that was announced.

        Raises:
            ValueError: the disk is full; the unfinished folder is removed on the way out.
        """
        file, expected = next(self._left)
        info = self._tensors[expected]
        assert name == expected, f"{name} came where {expected} was announced"
        assert tuple(values.shape) == info.shape, f"{name} is {list(values.shape)}"
        assert isinstance(info.dtype, torch.dtype), f"{name} has no type that can be written"
        raw = values.detach().to(device="cpu", dtype=info.dtype).contiguous()
        with self._explained():
            if self._plan[file][0] == name:
                self._open(file)
            assert self._file is not None, "the first tensor of a file opens it"
            self._file.write(raw.reshape(-1).view(torch.uint8).numpy().data)

    def _open(self, file: str) -> None:
        self._close_file()
        self._file = (self._partial / file).open("wb")
        header = json.dumps(_header(self._plan[file], self._tensors)).encode()
        header += b" " * (-len(header) % 8)
        self._file.write(len(header).to_bytes(8, "little") + header)

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def _finish(self) -> None:
        """Write the small files and give the folder its name."""
        missing = [name for _, name in self._left]
        assert not missing, f"{missing[0]} and {len(missing) - 1} more were announced, never added"
        self._close_file()
        if len(self._plan) > 1:
            files = {name: file for file, names in self._plan.items() for name in names}
            index = {"metadata": {"total_size": self.num_bytes}, "weight_map": files}
            self._write_json(INDEX, index)
        self._config.pop("torch_dtype", None)
        self._write_json(CONFIG, self._config | {"dtype": _main_dtype(self._tensors)})
        if self._tokenizer is not None:
            for name in TOKENIZER_FILES:
                if (self._tokenizer / name).is_file():
                    shutil.copyfile(self._tokenizer / name, self._partial / name)
        if self.folder.is_dir():
            self.folder.rmdir()
        self._partial.rename(self.folder)

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        text = json.dumps(value, indent=2) + "\n"
        (self._partial / name).write_text(text, encoding="utf-8")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            remedy = "Check the path and its permissions."
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                remedy = "Free some space, or give a folder on another disk."
            raise ValueError(
                f"{self.folder} cannot be written ({error.strerror}): nothing is left of it. "
                f"{remedy}"
            ) from error


def _files_of(
    tensors: Mapping[str, TensorInfo], *, max_file_bytes: int
) -> dict[str, Sequence[str]]:
    """Which tensors go into which file; every value starts at a multiple of its size."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, info in tensors.items():
        assert isinstance(info.dtype, torch.dtype), f"{name} has no type that can be written"
        is_full = size + info.num_bytes > max_file_bytes
        if groups[-1] and (is_full or size % info.dtype.itemsize):
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += info.num_bytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    stem = SINGLE.removesuffix(".safetensors")
    return {
        f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors": names
        for number, names in enumerate(groups, start=1)
    }


def _header(names: Sequence[str], tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in names:
        info = tensors[name]
        assert isinstance(info.dtype, torch.dtype), f"{name} has no type that can be written"
        stop = start + info.num_bytes
        header[name] = {
            "dtype": _NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    return header


def _main_dtype(tensors: Mapping[str, TensorInfo]) -> str:
    """The type of most values, by transformers' name."""
    sizes: dict[str, int] = {}
    for info in tensors.values():
        name = str(info.dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + info.num_bytes
    return max(sizes, key=lambda name: sizes[name])


def _existing(path: Path) -> Path:
    """The nearest folder above that exists."""
    path = path.absolute().parent
    while not path.exists():
        path = path.parent
    return path
