"""A Llama's GGUF file reads as the tensors it was made from, in Hugging Face's order of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_ext.weights.checks import open_checkpoint
from megatron_ext.weights.gguf_source import GgufSource
from megatron_ext.weights.operators import Block
from megatron_ext.weights.sources import CheckpointError
from tests.weights.folders import random_tensors

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
Q8 = gguf.GGMLQuantizationType.Q8_0


def gguf_name(name: str) -> str:
    outside = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    if name in outside:
        return outside[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def llama_cpp_rows(values: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter permutes query and key: halves of a head become pairs."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """96 tokens of a sentencepiece model: a few bytes, letters, and a token that ends a turn."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(60)), "\u2581"]
    tokens += [*(chr(97 + i) for i in range(26)), "\u2581a", "ab", "<|eot_id|>", "x", "y", "z"]
    kinds = [2, 3, 3, *[6] * 60, *[1] * (len(tokens) - 63)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(rank) for rank in range(len(tokens))])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def write_gguf(
    path: Path,
    tensors: dict[str, Tensor],
    *,
    architecture: str = "llama",
    rope_factors: np.ndarray | None = None,
    metadata: dict[str, Any] | None = None,
    tensors_in_a_part: int = 0,
    has_tokenizer: bool = False,
) -> dict[str, Tensor]:
    """Write matrices as Q8_0; what they are after dequantisation.  metadata: more of it."""
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_in_a_part)
    for key, value in (metadata or {}).items():
        kinds = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
        kinds.get(type(value), writer.add_float32)(key, value)
    if has_tokenizer:
        add_tokenizer(writer)
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(96)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(500000.0)
    expected = {}
    for name, tensor in tensors.items():
        values = tensor.numpy()
        heads = 4 if "q_proj" in name else 2 if "k_proj" in name else 0
        stored = llama_cpp_rows(values, heads) if heads else values
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), stored)
        else:
            writer.add_tensor(gguf_name(name), quantize(stored, Q8), raw_dtype=Q8)
            values = dequantize(quantize(values, Q8), Q8)
        expected[name] = torch.from_numpy(values)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def llama3_factors(factor: float) -> np.ndarray:
    """As llama.cpp's converter computes them from Llama 3.1's config.json."""
    factors = []
    for freq in 1.0 / 500000.0 ** (np.arange(0, 8, 2) / 8):
        wave = 2 * np.pi / freq
        if wave < 8192 / 4:
            factors.append(1.0)
        elif wave > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wave - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def test_tensors_are_those_it_was_made_from(tmp_path: Path):
    expected = write_gguf(tmp_path / "m.gguf", random_tensors(CONFIG))
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.architecture.tied
    for name, tensor in expected.items():
        whole = checkpoint.source.read(Block(name=name, rows=slice(0, len(tensor))))
        assert torch.equal(whole, tensor), name
    block = Block(
        name="model.layers.1.self_attn.q_proj.weight", rows=slice(3, 21), columns=slice(5, 9)
    )
    assert torch.equal(checkpoint.source.read(block), expected[block.name][3:21, 5:9])


def test_transformers_reads_the_same(tmp_path: Path):
    write_gguf(tmp_path / "m.gguf", random_tensors(CONFIG))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    source = GgufSource(tmp_path / "m.gguf")
    for name, tensor in model.state_dict().items():
        if name in source.tensors:
            assert torch.equal(source.read(Block(name=name, rows=slice(0, len(tensor)))), tensor)


def test_llama3_scaling_is_recognised(tmp_path: Path):
    write_gguf(tmp_path / "m.gguf", random_tensors(CONFIG), rope_factors=llama3_factors(32.0))
    rope = open_checkpoint(tmp_path / "m.gguf").architecture.rope
    assert (rope.kind, rope.factor, rope.original_positions) == ("llama3", 32.0, 8192)


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    return str(caught.value)


def test_other_rope_factors_are_refused(tmp_path: Path):
    write_gguf(tmp_path / "m.gguf", random_tensors(CONFIG), rope_factors=np.ones(4, np.float32) * 3)
    assert "rope_freqs.weight is not the scaling of Llama 3.1" in refused(tmp_path / "m.gguf")


def test_other_architectures_are_refused(tmp_path: Path):
    write_gguf(tmp_path / "m.gguf", random_tensors(CONFIG), architecture="qwen2")
    assert "the model is a 'qwen2': only Llama models" in refused(tmp_path / "m.gguf")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9])
def test_truncated_files_are_refused(tmp_path: Path, share: float):
    path = tmp_path / "m.gguf"
    write_gguf(path, random_tensors(CONFIG))
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    assert "no readable GGUF file" in refused(path)


def test_a_divided_model_is_read_whole(tmp_path: Path):
    """N24: by the name of any of its parts."""
    tensors = random_tensors(CONFIG)
    expected = write_gguf(tmp_path / "m.gguf", tensors, tensors_in_a_part=8)
    parts = sorted(path.name for path in tmp_path.iterdir())
    assert parts == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for part in parts[:2]:
        source = open_checkpoint(tmp_path / part).source
        for name, tensor in expected.items():
            assert torch.equal(source.read(Block(name=name, rows=slice(0, len(tensor)))), tensor)
        source.close()
    (tmp_path / parts[1]).rename(tmp_path / "other.gguf")
    text = refused(tmp_path / parts[0])
    assert f"{parts[1]}: missing of the 3 parts of this model" in text
    assert "other.gguf is one of 3 parts" in refused(tmp_path / "other.gguf")
    (tmp_path / parts[1]).write_bytes((tmp_path / parts[2]).read_bytes())
    assert f"{parts[1]} has split.no 2, not 1" in refused(tmp_path / parts[0])
