"""A Llama's GGUF file reads as the tensors it was made from, in Hugging Face's order of rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_ext.weights.checks import open_checkpoint
from megatron_ext.weights.gguf_source import GgufSource
from megatron_ext.weights.operators import Block
from megatron_ext.weights.sources import CheckpointError
from tests.weights.folders import random_tensors
from tests.weights.gguf_files import CONFIG, llama3_factors, write_gguf


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
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file="m.gguf",
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=False,
    )
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
