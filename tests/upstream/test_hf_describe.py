"""Arguments -> config.json -> arguments is the identity, or the reason why not."""

from __future__ import annotations

import copy
from argparse import Namespace
from typing import Any

import pytest

from megatron_ext.upstream.arguments import build_parser
from megatron_ext.upstream.hf_config import megatron_arguments
from megatron_ext.upstream.hf_describe import describe
from megatron_ext.weights.architecture import Architecture
from megatron_ext.weights.checks import tensor_shapes
from megatron_ext.weights.families import architecture_of
from tests.weights.tiny_models import BASE, MODELS


def architecture(name: str) -> Architecture:
    tiny = MODELS[name]
    return architecture_of({"model_type": tiny.family, **BASE, **tiny.config})


def arguments(values: dict[str, Any]) -> Namespace:
    args = copy.deepcopy(build_parser().read([])[0])
    for name, value in (values | {"max_position_embeddings": 64}).items():
        setattr(args, name, value)
    return args


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name: str):
    values = megatron_arguments(architecture(name), max_length=0)
    config = describe(arguments(values))
    again = architecture_of(config)
    assert megatron_arguments(again, max_length=0) == values
    assert dict(tensor_shapes(again)) == dict(tensor_shapes(architecture(name)))


def test_one_head_a_group_without_the_flag():
    values = megatron_arguments(architecture("qwen3"), max_length=0)
    args = arguments(values | {"group_query_attention": False, "num_query_groups": 1})
    assert describe(args)["num_key_value_heads"] == 4


@pytest.mark.parametrize(
    ("name", "changed", "problem"),
    [
        ("llama", {"normalization": "LayerNorm"}, "normalization LayerNorm: a llama has RMSNorm"),
        ("llama", {"swiglu": False}, "swiglu False: a llama has True"),
        ("llama", {"position_embedding_type": "learned_absolute"}, "position_embedding_type"),
        ("mixtral", {"moe_router_pre_softmax": True}, "moe_router_pre_softmax True"),
        ("mixtral", {"moe_shared_expert_intermediate_size": 8}, "moe_shared_expert"),
        ("deepseek_v2", {"moe_layer_freq": [0, 1, 0, 1]}, "moe_layer_freq"),
        ("deepseek_v3", {"layernorm_epsilon": 1e-5}, "cannot be written as a deepseek_v3"),
        ("llama", {"rotary_percent": 0.5}, "rotary_percent 0.5: a llama has 1.0"),
    ],
)
def test_what_no_family_computes_is_refused(name: str, changed: dict[str, Any], problem: str):
    values = megatron_arguments(architecture(name), max_length=0)
    with pytest.raises(ValueError, match="cannot be written as") as caught:
        describe(arguments(values | changed))
    assert problem in str(caught.value)
