"""A GGUF file of a Llama as a source: tensors under Hugging Face's names, dequantised row by row.

llama.cpp stores query and key rows so that neighbours form a rotated pair; they are put back into
Hugging Face's order, where halves do, as transformers does.  The file's metadata stands for a
config.json.  Not covered: other architectures, mixtures of experts.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from torch import Tensor

from megatron_ext.weights.operators import Block
from megatron_ext.weights.sources import REMAP_BYTES, CheckpointError, TensorInfo

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
_SPECIAL = ("bos", "eos", "padding")
_ROPE_FACTORS = "rope_freqs.weight"
_UNREADABLE = (OSError, ValueError, KeyError, IndexError, TypeError, OverflowError, MemoryError)
"""What the gguf package raises for a file that is none, or a damaged one."""


class GgufSource:
    """A GGUF file; values are float32 whatever the file holds.

    Raises:
        CheckpointError: the file is damaged, or not a Llama.
    """

    def __init__(self, path: Path) -> None:
        self.location = path
        self._bytes_read = 0
        if not path.is_file():
            raise CheckpointError(path, ["there is no such file. Check the path."])
        try:
            reader = GGUFReader(path)
            self._mapped: Any = reader.data
            metadata = _metadata(reader)
            self._parts = {_hf_name(tensor.name): tensor for tensor in reader.tensors}
        except _UNREADABLE as error:
            problem = f"no readable GGUF file ({error}). Download it again."
            raise CheckpointError(path, [problem]) from error
        problems: list[str] = []
        factors = self._parts.pop(_ROPE_FACTORS, None)
        self.config = _config(metadata, problems, is_tied="lm_head.weight" not in self._parts)
        if factors is not None and not problems:
            self.config |= _llama3_scaling(np.asarray(factors.data), self.config, problems)
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
        self._mapped._mmap.madvise(mmap.MADV_DONTNEED)
        self._bytes_read = 0


def _metadata(reader: GGUFReader) -> dict[str, Any]:
    """What the file says of the model; of the tokenizer only how many tokens it has."""
    tokens = reader.fields.get("tokenizer.ggml.tokens")
    wanted = ("general.", "llama.", *(f"tokenizer.ggml.{name}_token_id" for name in _SPECIAL))
    return {
        "num_tokens": len(tokens.data) if tokens else None,
        **{
            name: field.contents()
            for name, field in reader.fields.items()
            if name.startswith(wanted)
        },
    }


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


def _config(metadata: Mapping[str, Any], problems: list[str], *, is_tied: bool) -> dict[str, Any]:
    """The metadata as the fields of a config.json."""
    kind = metadata.get("general.architecture")
    if kind != "llama" or metadata.get("llama.expert_count"):
        problems.append(
            f"the model is a {kind!r}{' with experts' if kind == 'llama' else ''}: only Llama "
            "models are read from GGUF. Use the safetensors checkpoint."
        )
        return {}
    names = {
        "hidden_size": "embedding_length",
        "num_hidden_layers": "block_count",
        "intermediate_size": "feed_forward_length",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "max_position_embeddings": "context_length",
        "vocab_size": "vocab_size",
        "head_dim": "rope.dimension_count",
        "rope_theta": "rope.freq_base",
    }
    config = {name: metadata.get(f"llama.{key}") for name, key in names.items()}
    for name in _SPECIAL:
        key = f"{name.removesuffix('ding')}_token_id"
        config[key] = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if config["vocab_size"] is None:
        config["vocab_size"] = metadata["num_tokens"]
    if config["num_key_value_heads"] is None:
        config["num_key_value_heads"] = config["num_attention_heads"]
    config = {name: value for name, value in config.items() if value is not None}
    for name in ("num_attention_heads", "num_key_value_heads"):
        if not isinstance(config.get(name), int) or config[name] < 1:
            problems.append(f"its metadata has no {name}. Download it again.")
    scaling = metadata.get("llama.rope.scaling.type")
    if scaling not in (None, "none"):
        config["rope_scaling"] = {
            "rope_type": scaling,
            "factor": metadata.get("llama.rope.scaling.factor"),
            "original_max_position_embeddings": metadata.get(
                "llama.rope.scaling.original_context_length"
            ),
        }
    return config | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "tie_word_embeddings": is_tied,
        "dtype": "float32",
    }


def _llama3_scaling(
    factors: np.ndarray, config: Mapping[str, Any], problems: list[str]
) -> dict[str, Any]:
    """Llama 3.1's scaling, which GGUF keeps as one divisor for each frequency.

    It is taken over only if it is exactly the scaling of Llama 3.1 to 3.3 with some factor.
    """
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    factor = float(factors.max())
    waves = [
        2 * math.pi * config.get("rope_theta", 10000.0) ** (2 * i / size) for i in range(size // 2)
    ]
    expected = []
    for wave in waves:
        smooth = min(max((8192 / wave - 1.0) / (4.0 - 1.0), 0.0), 1.0)
        expected.append(1 / ((1 - smooth) / factor + smooth))
    if len(expected) != len(factors) or not np.allclose(expected, factors, rtol=1e-3):
        problems.append(
            f"{_ROPE_FACTORS} is not the scaling of Llama 3.1: its rotary positions cannot be "
            "expressed. Use the safetensors checkpoint."
        )
        return {}
    return {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    }
