"""Every field that transformers reads of our families' config.json is honoured, or has a reason.

The list comes from the installed transformers: the fields of a family's configuration class, what
its modelling code asks a config for, and what the code that all models share does.  A field of a
new transformers fails here by name.
"""

from __future__ import annotations

import ast
import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.modeling_rope_utils import RopeParameters
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from megatron_ext.weights.config_fields import NEUTRAL, WITHOUT_EFFECT, has_place
from megatron_ext.weights.families import FAMILIES, architecture_of, read_config
from megatron_ext.weights.fields import Fields
from megatron_ext.weights.rope_json import _OTHER_KINDS, rope
from tests.marks import slow_except
from tests.weights.tiny_models import BASE, LATENT

TRANSFORMERS = Path(transformers.__file__).parent
SHARED = (
    "modeling_rope_utils.py",
    "masking_utils.py",
    "cache_utils.py",
    "modeling_utils.py",
    "integrations/moe.py",
    "integrations/sdpa_attention.py",
)
CLASS_ATTRIBUTES = {"__class__", "base_model_pp_plan", "base_model_tp_plan", "sub_configs"}
CONFIGS: dict[str, dict[str, Any]] = {
    name: {
        **BASE,
        "model_type": name,
        "head_dim": 12,
        **(LATENT if name.startswith("deepseek") else {}),
        "num_experts_per_tok": 2,
    }
    for name in FAMILIES
}


def is_config(node: ast.AST) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name in ("config", "text_config", "decoder_config")


@cache
def asked_for(file: str) -> frozenset[str]:
    """What a source file reads of a config, by attribute or getattr; methods are left out."""
    tree = ast.parse((TRANSFORMERS / file).read_text(encoding="utf-8"))
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_config(node.value) and id(node) not in called:
            found.add(node.attr)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            config, name = node.args[:2]
            if is_config(config) and isinstance(name, ast.Constant):
                found.add(str(name.value))
    return frozenset(found - CLASS_ATTRIBUTES)


def fields_of_transformers(family: str) -> set[str]:
    config: Any = CONFIG_MAPPING[family]
    names = {field.name for field in dataclasses.fields(config)}
    names |= set(config.attribute_map) | set(config.attribute_map.values())
    for file in (f"models/{family}/modeling_{family}.py", *SHARED):
        names |= asked_for(file)
    return names


def fields_read(family: str) -> set[str]:
    fields = Fields(CONFIGS[family])
    FAMILIES[family].read(fields)
    return fields.read


@pytest.mark.parametrize("family", slow_except({"mixtral", "deepseek_v3"}, FAMILIES))
def test_every_field_of_transformers_has_its_place(family: str):
    read, is_latent = fields_read(family), family.startswith("deepseek")
    missing = {
        name
        for name in fields_of_transformers(family)
        if name not in read and not has_place(name, is_latent=is_latent)
    }
    assert not missing, f"{family}: {sorted(missing)} are read by transformers, not by us"


def test_every_rotary_field_of_transformers_has_its_place():
    fields = Fields({"rope_parameters": {"mrope_section": [1]}, "max_position_embeddings": 4})
    rope(fields, theta=1.0, max_positions=4, is_interleaved=False)
    (problem,) = fields.problems  # that it is refused shows which names are known
    assert "mrope_section in the rotary fields" in problem
    for name in RopeParameters.__annotations__:
        fields = Fields({"rope_parameters": {name: 1}, "max_position_embeddings": 4})
        rope(fields, theta=1.0, max_positions=4, is_interleaved=False)
        is_known = not any("not known here" in problem for problem in fields.problems)
        assert is_known == (name != "mrope_section"), name
    assert {"short_factor", "long_factor"} <= _OTHER_KINDS  # of longrope, which is refused


CHANGED: dict[str, Any] = {
    "hidden_act": "gelu",
    "layer_types": ["sliding_attention"] * 4,
    "mlp_only_layers": [1],
    "topk_method": "group_limited_greedy",
    "scoring_func": "other",
    "rope_parameters": {"rope_theta": 5.0, "rope_type": "default"},
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "quantization_config": {"quant_method": "fp8"},
    "head_dim": 16,
    "attention_dropout": 0.5,
    "partial_rotary_factor": 0.5,
    "num_key_value_heads": 1,
    "original_max_position_embeddings": 8,
    "rope_interleave": False,
    "max_window_layers": 2,
}
CONTEXT: dict[str, dict[str, Any]] = {
    "layer_types": {"use_sliding_window": True, "sliding_window": 8},
    "max_window_layers": {"use_sliding_window": True, "sliding_window": 8},
    "sliding_window": {"use_sliding_window": True, "max_window_layers": 0},
    "use_sliding_window": {"sliding_window": 8, "max_window_layers": 0},
    "n_group": {"topk_method": "group_limited_greedy", "topk_group": 1},
    "topk_group": {"topk_method": "group_limited_greedy", "n_group": 8},
    "topk_method": {"n_group": 4, "topk_group": 2},
    "original_max_position_embeddings": {"rope_scaling": {"type": "yarn", "factor": 2.0}},
}
SAME_EVERYWHERE = {
    ("qwen3_moe", "layer_types"): "all its layers have the window",
    ("qwen3_moe", "max_window_layers"): "all its layers have the window",
    ("deepseek_v3", "topk_method"): "",
}


def reading(config: dict[str, Any]) -> Any:
    """The architecture, or the refusal."""
    try:
        return architecture_of(config)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_that_is_read_changes_the_model_or_is_refused(family: str):
    """So that `read` means honoured."""
    for name in sorted(fields_read(family) - {"model_type"}):
        if (family, name) in SAME_EVERYWHERE:
            continue
        config = CONFIGS[family] | CONTEXT.get(name, {})
        if family == "deepseek_v3" and name in ("n_group", "topk_group"):
            config = CONFIGS[family]
        before = config.get(name)
        is_flag = name.startswith(("use_", "attention_bias", "mlp_bias", "tie_", "norm_topk"))
        number = 0.5 if name.endswith(("eps", "theta", "factor")) else (before or 0) + 3
        value = CHANGED.get(name, (not before) if is_flag else number)
        values = {repr(reading(config | {name: value}))}
        values.add(repr(reading(config | {name: False})) if is_flag else repr(reading(config)))
        assert len(values) == 2, f"{family}: {name} {value!r} changes nothing"


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("per_layer_config", {"0": {"sliding_window": 4}}),
        ("is_causal", False),
        ("attention_chunk_size", 8),
        ("layer_types", ["full_attention", "linear_attention"]),
        ("transformers_weights", "other.safetensors"),
        ("rope_interleaved", True),
    ],
)
def test_fields_that_are_not_built_are_refused_by_name(family: str, name: str, value: Any):
    with pytest.raises(ValueError, match=name):
        architecture_of(CONFIGS[family] | {name: value})
    neutral = ["full_attention"] * 4 if name == "layer_types" else NEUTRAL[name][0]
    assert architecture_of(CONFIGS[family] | {name: neutral}) == architecture_of(CONFIGS[family])


def test_a_window_of_a_family_without_one_counts():
    """transformers' cache drops what lies before it, its full forward pass does not."""
    assert architecture_of(CONFIGS["llama"] | {"sliding_window": 8}).sliding_window == 8


def test_unknown_fields_are_named():
    config = CONFIGS["llama"] | {
        "a_new_field": 1,
        "another": None,
        "_private": 2,
        "use_cache": True,
    }
    assert read_config(config)[1] == ["num_experts_per_tok", "a_new_field"]
    assert set(WITHOUT_EFFECT) & set(NEUTRAL) == set()
