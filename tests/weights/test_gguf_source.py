"""A Llama's GGUF file reads as the tensors it was made from, in Hugging Face's order of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_ext.weights.checks import open_checkpoint
from megatron_ext.weights.gguf_source import GgufSource
from megatron_ext.weights.operators import Block
from megatron_ext.weights.sources import CheckpointError
from megatron_ext.weights.stop_ids import stop_ids_of
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


ROPE = "llama.rope"
YARN = {f"{ROPE}.scaling.type": "yarn", f"{ROPE}.scaling.factor": 4.0}


def config_with(path: Path, metadata: dict[str, Any]) -> dict[str, Any]:
    write_gguf(path, random_tensors(CONFIG), metadata=metadata)
    return dict(GgufSource(path).config)


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({f"{ROPE}.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({f"{ROPE}.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {f"{ROPE}.scaling.factor": 4.0, f"{ROPE}.scale_linear": 2.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({f"{ROPE}.scaling.factor": 1.0, f"{ROPE}.scaling.finetuned": True}, None),
        ({f"{ROPE}.scaling.factor": 4.0, f"{ROPE}.scaling.type": "none"}, None),
        ({f"{ROPE}.scaling.type": "yarn"}, None),
        (YARN, {"rope_type": "yarn", "factor": 4.0}),
        (
            {
                **YARN,
                f"{ROPE}.scaling.original_context_length": 16,
                f"{ROPE}.scaling.yarn_beta_fast": 16.0,
                f"{ROPE}.scaling.yarn_beta_slow": 2.0,
                f"{ROPE}.scaling.yarn_ext_factor": 1.0,
                f"{ROPE}.scaling.attn_factor": 1.0,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
            },
        ),
    ],
)
def test_positions_are_scaled_as_llama_cpp_does(
    tmp_path: Path, metadata: dict[str, Any], scaling: dict[str, Any] | None
):
    """N3: without a type the scaling is linear."""
    config = config_with(tmp_path / "m.gguf", metadata)
    assert config.get("rope_scaling") == scaling
    rope = open_checkpoint(tmp_path / "m.gguf").architecture.rope
    assert (rope.kind, rope.factor) == (
        (scaling["rope_type"], scaling["factor"]) if scaling else ("default", 1.0)
    )


def test_yarns_weight_is_llama_cpps(tmp_path: Path):
    """N3: a factor on what follows from the scaling; Megatron's refusal of it names it."""
    config = config_with(tmp_path / "m.gguf", {**YARN, f"{ROPE}.scaling.attn_factor": 2.0})
    attention_factor = config["rope_scaling"]["attention_factor"]
    assert attention_factor == pytest.approx(2 * (1 + 0.1 * np.log(4)))
    architecture = open_checkpoint(tmp_path / "m.gguf").architecture
    assert architecture.rope.attention_factor == attention_factor


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({**YARN, f"{ROPE}.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor 0.5: only 1.0"),
        ({**YARN, f"{ROPE}.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier 0.1"),
        ({f"{ROPE}.scaling.attn_factor": 2.0}, "attn_factor 2: built with yarn only"),
        ({f"{ROPE}.scaling.factor": "4"}, "llama.rope.scaling.factor '4': not a number"),
        ({"llama.attention.sliding_window": 32}, "llama.attention.sliding_window 32: only 0"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale 0.5: only 0.0 is built"),
        ({"llama.attention.value_length": 16}, "value_length 16: heads have 8 widths"),
        ({"llama.attention.key_length": 4}, "llama.rope.dimension_count 8: heads have 4 widths"),
        ({"llama.a_new_key": 1}, "llama.a_new_key 1: not known here"),
        ({"general.type": "adapter"}, "the file's type is adapter, not model"),
    ],
)
def test_keys_that_are_not_built_are_refused_by_name(
    tmp_path: Path, metadata: dict[str, Any], problem: str
):
    """N3"""
    write_gguf(tmp_path / "m.gguf", random_tensors(CONFIG), metadata=metadata)
    assert problem in refused(tmp_path / "m.gguf")


def test_llama3_factors_beside_another_scaling_are_refused(tmp_path: Path):
    """N3: llama.cpp applies both."""
    write_gguf(
        tmp_path / "m.gguf",
        random_tensors(CONFIG),
        rope_factors=llama3_factors(32.0),
        metadata={f"{ROPE}.scaling.factor": 4.0},
    )
    assert "rope_freqs.weight beside llama.rope.scaling" in refused(tmp_path / "m.gguf")


def test_all_ids_that_end_a_response(tmp_path: Path):
    """N4"""
    ids = {"eos": 58, "eot": 59, "bos": 57}
    metadata = {f"tokenizer.ggml.{name}_token_id": id for name, id in ids.items()}
    config = config_with(tmp_path / "m.gguf", metadata)
    assert (config["eos_token_id"], config["bos_token_id"]) == ([58, 59], 57)
    assert stop_ids_of(tmp_path / "m.gguf") == {58, 59}


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
