"""A GGUF file of a Llama as a source: tensors under Hugging Face's names, dequantised row by row.

llama.cpp stores query and key rows so that neighbours form a rotated pair; they are put back into
Hugging Face's order, where halves do, as transformers does.  The file's metadata stands for a
config.json (`gguf_config`).  A file that llama-gguf-split has divided is read with all its parts.
Not covered: other architectures, mixtures of experts.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from torch import Tensor

from megatron_ext.weights.gguf_config import ROPE_FACTORS, config_of, end_ids, llama3_scaling
from megatron_ext.weights.operators import Block
from megatron_ext.weights.sources import REMAP_BYTES, CheckpointError, TensorInfo
from megatron_ext.weights.weight_files import listed

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INSIDE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_WANTED = (
    "general.architecture",
    "general.type",
    "llama.",
    "split.",
    "tokenizer.ggml.tokens",
    *(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom", "padding")),
)
_UNREADABLE = (OSError, ValueError, KeyError, IndexError, TypeError, OverflowError, MemoryError)
"""What the gguf package raises for a file that is none, or a damaged one."""


def gguf_end_ids(path: Path) -> list[int]:
    """The tokens that end a response, of a model's file or first part.

    Raises:
        CheckpointError: the file is damaged.
    """
    first = _all_parts(path)[0]
    return end_ids(read_metadata(_opened(first), path=first))


class GgufSource:
    """A GGUF file; values are float32 whatever the file holds.

    Raises:
        CheckpointError: the file is damaged, or not a Llama.
    """

    def __init__(self, path: Path) -> None:
        self._bytes_read = 0
        self.notes: Sequence[str] = ()
        paths = _all_parts(path)
        self.location = paths[0]
        readers = [_opened(part) for part in paths]
        self._mapped: list[Any] = [reader.data for reader in readers]
        metadata = read_metadata(readers[0], path=paths[0])
        problems = _part_problems(readers, paths, metadata)
        if problems:
            raise CheckpointError(path, problems)
        self._parts = {_hf_name(t.name): t for reader in readers for t in reader.tensors}
        factors = self._parts.pop(ROPE_FACTORS, None)
        self.config = config_of(metadata, problems, is_tied="lm_head.weight" not in self._parts)
        if factors is not None and not problems:
            self.config |= llama3_scaling(np.asarray(factors.data), self.config, problems)
        for name, tensor in self._parts.items():
            if tensor.tensor_type not in GGML_QUANT_SIZES:
                problems.append(f"{name} has the unknown type {tensor.tensor_type}.")
        if problems:
            raise CheckpointError(path, problems)
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(
                shape=tuple(int(size) for size in reversed(tensor.shape)), dtype=torch.float32
            )
            for name, tensor in self._parts.items()
        }

    def read(self, block: Block) -> Tensor:
        """The values of a rectangle, dequantised."""
        tensor = self._parts[block.name]
        rows = np.arange(self.tensors[block.name].shape[0])[block.rows]
        heads = self._rotated_heads(block.name)
        if heads:
            rows = _rows_in_file(rows, head_size=self.tensors[block.name].shape[0] // heads)
        try:
            values = dequantize(tensor.data[rows], tensor.tensor_type)
        except (*_UNREADABLE, NotImplementedError) as error:  # gguf's, for types it only stores
            problem = f"{block.name} cannot be dequantised ({error}). Use another quantisation."
            raise CheckpointError(self.location, [problem]) from error
        self._bytes_read += values.nbytes
        if self._bytes_read > REMAP_BYTES:
            self.close()
        result = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
        return result if block.columns is None else result[:, block.columns]

    def _rotated_heads(self, name: str) -> int:
        """Heads of a tensor whose rows are stored in pairs, 0 for the others."""
        if ".q_proj." in name:
            return self.config["num_attention_heads"]
        return self.config["num_key_value_heads"] if ".k_proj." in name else 0

    def close(self) -> None:
        """Let go of the pages read so far, which count as used memory."""
        for mapped in self._mapped:
            mapped._mmap.madvise(mmap.MADV_DONTNEED)
        self._bytes_read = 0


def _opened(path: Path) -> GGUFReader:
    if not path.is_file():
        raise CheckpointError(path, ["there is no such file. Check the path."])
    try:
        return GGUFReader(path)
    except _UNREADABLE as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(path, [f"no readable GGUF file ({error}). Download it again."])


def _all_parts(path: Path) -> list[Path]:
    """The files that together are the model: of a divided one all, whichever is named."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    stem, count = match[1], int(match[3])
    parts = [path.with_name(f"{stem}-{i + 1:05d}-of-{match[3]}.gguf") for i in range(count)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise CheckpointError(
            path, listed(missing, f"missing of the {count} parts of this model; download them too")
        )
    return parts


def _part_problems(
    readers: Sequence[GGUFReader], paths: Sequence[Path], metadata: Mapping[str, Any]
) -> list[str]:
    """Why the files are not the parts of one model."""
    count = metadata.get("split.count", 0) or 1
    if count != len(readers):
        return [
            f"{paths[0].name} is one of {count} parts of a model, and {len(readers)} have names "
            "of parts. Name them as they were: such as name-00001-of-00002.gguf."
        ]
    if metadata.get("general.type", "model") != "model":
        return [f"the file's type is {metadata['general.type']}, not model. Use the model's file."]
    problems = []
    for number, (reader, path) in enumerate(zip(readers, paths, strict=True)):
        field = reader.fields.get("split.no")
        if field is not None and field.contents() != number:
            problems.append(
                f"{path.name} has split.no {field.contents()}, not {number}. Rename the parts."
            )
    names = [tensor.name for reader in readers for tensor in reader.tensors]
    total = metadata.get("split.tensors.count")
    if (total is not None and len(names) != total) or len(names) != len(set(names)):
        problems.append(
            f"its parts have {len(names)} tensors, {len(set(names))} by name, of {total}: they are "
            "not of one model. Download them again."
        )
    return problems


def read_metadata(reader: GGUFReader, *, path: Path) -> dict[str, Any]:
    """What the file says of the model, and of the tokenizer its tokens and special ones."""
    try:
        return {
            name: field.contents()
            for name, field in reader.fields.items()
            if name.startswith(_WANTED)
        }
    except _UNREADABLE as error:
        raise _damaged(path, error) from error


def _hf_name(name: str) -> str:
    match = _LAYER.fullmatch(name)
    if match and match[2] in _INSIDE:
        return f"model.layers.{match[1]}.{_INSIDE[match[2]]}.{match[3]}"
    return _OUTSIDE.get(name, name)


def _rows_in_file(rows: np.ndarray, *, head_size: int) -> np.ndarray:
    """Where the file keeps Hugging Face's rows: in a head, row (half, i) is stored at (i, half)."""
    head, row = np.divmod(rows, head_size)
    half, place = np.divmod(row, head_size // 2)
    return head * head_size + 2 * place + half
