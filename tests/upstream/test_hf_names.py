"""Transformer Engine's modules and Megatron's local ones have the same names in the tables."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_ext.upstream.hf_weights import _in_layer

LAYER = SimpleNamespace(mlp=SimpleNamespace(local_expert_indices=[4, 5, 6, 7]))


@pytest.mark.parametrize(
    ("megatron", "table"),
    [
        ("input_layernorm.weight", "input_layernorm.weight"),
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        (
            "self_attention.linear_kv_up_proj.layer_norm_weight",
            "self_attention.kv_layernorm.weight",
        ),
        ("mlp.experts.local_experts.1.linear_fc2.weight", "mlp.experts.5.linear_fc2.weight"),
        ("mlp.experts.linear_fc1.weight3", "mlp.experts.7.linear_fc1.weight"),
        ("mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc1.weight"),
    ],
)
def test_name_in_a_layer(megatron: str, table: str):
    assert _in_layer(megatron, LAYER) == table
