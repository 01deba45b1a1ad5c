"""A small valid checkpoint folder, written by hand, for tests that break it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_ext.weights.checks import tensor_shapes
from megatron_ext.weights.families import architecture_of

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
}


def random_tensors(config: dict[str, Any] = CONFIG) -> dict[str, Tensor]:
    """Values for every tensor of a config.json."""
    generator = torch.Generator().manual_seed(3)
    shapes = tensor_shapes(architecture_of(config))
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes}


def write_folder(
    folder: Path,
    *,
    tensors: dict[str, Tensor] | None = None,
    config: dict[str, Any] = CONFIG,
    num_files: int = 1,
) -> dict[str, Tensor]:
    """Write config.json and the tensors, with an index if there are several files."""
    tensors = random_tensors(config) if tensors is None else tensors
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if num_files == 1:
        save_file(tensors, folder / "model.safetensors")
        return tensors
    names = list(tensors)
    weight_map = {}
    for number in range(num_files):
        file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        save_file({name: tensors[name] for name in names[number::num_files]}, folder / file)
        weight_map |= dict.fromkeys(names[number::num_files], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors
