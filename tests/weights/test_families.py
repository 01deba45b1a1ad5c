"""The tables name exactly the tensors that transformers saves, with their shapes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig

from megatron_ext.weights.architecture import Architecture
from megatron_ext.weights.checks import tensor_shapes
from megatron_ext.weights.families import FAMILIES, architecture_of, parameters
from tests.weights.tiny_models import BASE, MODELS, build

SIZES = {name: value for name, value in BASE.items() if name != "max_position_embeddings"}
HEADS = {"num_attention_heads": 32, "hidden_size": 128}


@pytest.mark.parametrize("name", MODELS)
def test_table_is_the_checkpoint(name: str, tmp_path: Path):
    model = build(MODELS[name])
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    from safetensors import safe_open

    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        saved = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    listed = list(tensor_shapes(architecture_of(config)))
    assert dict(listed) == saved
    assert len(listed) == len(saved), "a tensor belongs to two parameters"


def test_every_family_has_a_model():
    assert {tiny.family for tiny in MODELS.values()} == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_that_are_left_out_read_as_in_transformers(family: str):
    """Whatever transformers fills in when it saves must be what we take for granted."""
    needed = SIZES | HEADS | {"num_experts_per_tok": 2}
    del needed["num_key_value_heads"]
    needed |= heads_of(family)
    if family == "deepseek_v2":
        needed["norm_topk_prob"] = False
    filled_in = AutoConfig.for_model(family, **needed).to_dict()
    short = architecture_of({"model_type": family, **needed})
    assert same_rope(short) == same_rope(architecture_of({**filled_in, "model_type": family}))


def heads_of(family: str) -> dict[str, int]:
    """Latent attention has as many key/value heads as heads; another number is refused."""
    return {"num_key_value_heads": 32} if family.startswith("deepseek") else {}


def same_rope(architecture: Architecture) -> Architecture:
    return replace(architecture, rope=replace(architecture.rope, original_positions=0))


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_have_names_of_their_own(family: str):
    config = {"model_type": family, **SIZES, **HEADS, "num_experts_per_tok": 2}
    config |= heads_of(family)
    names = [parameter.name for parameter in parameters(architecture_of(config))]
    assert len(set(names)) == len(names)
    assert names[0] == "embedding.word_embeddings.weight"
    assert not [name for name in names if "{" in name]


def test_unknown_family_is_refused_by_name():
    with pytest.raises(ValueError, match=r"model_type 'gemma' is not supported.*llama, mistral"):
        architecture_of({"model_type": "gemma"})
