"""A GGUF file's metadata reads as llama.cpp reads it, or is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.weights.checks import open_checkpoint
from megatron_ext.weights.gguf_source import GgufSource
from megatron_ext.weights.stop_ids import stop_ids_of
from tests.weights.folders import random_tensors
from tests.weights.test_gguf_source import CONFIG, llama3_factors, refused, write_gguf

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
