"""Write a Llama of random weights in Hugging Face's layout, of Llama-2-7B's shape unless told.

    python tools/make_random_checkpoint.py random-7b                  # 13.5 GB
    python tools/make_random_checkpoint.py random-small --num-layers 4

For measuring what does not depend on the values: conversion, loading, memory.  One tensor is held.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from megatron_ext.options.ranges import in_range
from megatron_ext.weights.families import architecture_of
from megatron_ext.weights.stream import announced_tensors
from megatron_ext.weights.writer import CheckpointWriter

LLAMA_2_7B = {
    "num-layers": 32,
    "hidden-size": 4096,
    "ffn-size": 11008,
    "num-heads": 32,
    "num-kv-heads": 32,
    "vocab-size": 32000,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STANDARD_DEVIATION = 0.02


def main(argv: Sequence[str] | None = None) -> None:
    """Write one checkpoint."""
    parser = argparse.ArgumentParser(description="A Llama checkpoint of random weights.")
    parser.add_argument("output", type=Path, help="folder to create")
    for name, size in LLAMA_2_7B.items():
        parser.add_argument(
            f"--{name}", type=in_range(int, at_least=1), default=size, help=f"default {size}"
        )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="default bf16")
    parser.add_argument("--seed", type=in_range(int, at_least=0), default=0, help="default 0")
    options = parser.parse_args(argv)
    try:
        write(options.output, config_of(options), dtype=DTYPES[options.dtype], seed=options.seed)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def config_of(options: argparse.Namespace) -> dict[str, Any]:
    """The config.json of a Llama of these sizes."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": options.vocab_size,
        "hidden_size": options.hidden_size,
        "intermediate_size": options.ffn_size,
        "num_hidden_layers": options.num_layers,
        "num_attention_heads": options.num_heads,
        "num_key_value_heads": options.num_kv_heads,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


def write(folder: Path, config: dict[str, Any], *, dtype: torch.dtype, seed: int) -> None:
    """Write a checkpoint whose norms are 1 and whose matrices are normal."""
    tensors = announced_tensors(architecture_of(config), dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    writer = CheckpointWriter(folder, tensors=tensors, config=config)
    with writer, tqdm(total=writer.num_bytes, unit="B", unit_scale=True, leave=False) as bar:
        for name, info in tensors.items():
            values = torch.ones(info.shape, dtype=dtype)
            if len(info.shape) > 1:
                values.normal_(std=STANDARD_DEVIATION, generator=generator)
            writer.add(name, values)
            bar.update(info.num_bytes)
    print(f"{folder}: {len(tensors)} tensors, {writer.num_bytes / 1e9:.2f} GB")


if __name__ == "__main__":
    sys.exit(main())
