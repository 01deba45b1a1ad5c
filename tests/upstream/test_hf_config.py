"""Config mapping refuses what Megatron cannot compute, and flags that deny the checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ext.upstream.arguments import build_parser
from megatron_ext.upstream.hf_config import megatron_arguments, training_defaults
from megatron_ext.upstream.hf_flags import checkpoint_values
from megatron_ext.weights.families import architecture_of
from tests.weights.tiny_models import BASE, LATENT, LLAMA3, YARN

LLAMA = {"model_type": "llama", **BASE}
MOE = {
    "model_type": "qwen3_moe",
    **BASE,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    **BASE,
    **LATENT,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
}


def refusal(config: dict[str, Any], **options: int) -> str:
    with pytest.raises(ValueError, match="asks for what is not built") as caught:
        megatron_arguments(architecture_of(config), **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act 'gelu': only silu is built"),
        (LLAMA | {"attention_bias": True}, "attention_bias true with mlp_bias false"),
        (LLAMA | {"mlp_bias": True}, "attention_bias false with mlp_bias true"),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (LLAMA | {"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0}}, "low_freq_factor 2"),
        (
            LLAMA | {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 4096}},
            "original_positions 4096",
        ),
        (LLAMA | {"rope_parameters": YARN | {"truncate": False}}, "rope truncate false"),
        (LLAMA | {"rope_parameters": YARN | {"attention_factor": 2.0}}, "attention_factor 2"),
        (LLAMA | {"rope_parameters": YARN | {"mscale_all_dim": 1.0}}, "without mscale"),
        (MOE | {"num_experts_per_tok": 1, "norm_topk_prob": True}, "num_experts_per_tok 1"),
        (MOE | {"num_experts_per_tok": 5}, "num_experts_per_tok 5 of 4 experts"),
        (DEEPSEEK | {"norm_topk_prob": False}, "norm_topk_prob false"),
        (DEEPSEEK | {"attention_bias": True}, "attention_bias or mlp_bias true"),
        (DEEPSEEK | {"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05"),
        (DEEPSEEK | {"n_group": 3}, "n_group 3 and topk_group 2 are no groups of 8 experts"),
        (DEEPSEEK | {"num_experts_per_tok": 2}, "Megatron scores a group by its best 1 experts"),
        (
            DEEPSEEK | {"rope_parameters": LLAMA3},
            "rope_type 'llama3': known here are default, yarn",
        ),
    ],
)
def test_what_megatron_does_not_compute_is_refused_by_name(config: dict[str, Any], text: str):
    assert text in refusal(config)


def test_all_refusals_at_once():
    rope = {"type": "ntk", "factor": 2.0}
    text = refusal(LLAMA | {"hidden_act": "relu", "mlp_bias": True, "rope_scaling": rope})
    assert "hidden_act" in text
    assert "mlp_bias" in text
    assert "rope_type 'ntk'" in text


def test_a_sliding_window_is_refused_where_it_takes_effect():
    config = LLAMA | {"model_type": "mistral", "sliding_window": 32}
    text = refusal(config)
    assert "sliding_window 32" in text
    assert "sequences of 64 positions" in text
    assert "sequences of 33 positions" in refusal(config, max_length=33)
    megatron_arguments(architecture_of(config), max_length=32)


@pytest.mark.parametrize("config", [LLAMA, MOE, DEEPSEEK], ids=lambda c: c["model_type"])
def test_every_value_has_a_destination_in_megatron(config: dict[str, Any]):
    parser = build_parser()
    known = {action.dest for action in parser._actions}
    yarn = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
    architecture = architecture_of(config | {"rope_parameters": yarn})
    values = megatron_arguments(architecture) | training_defaults(architecture)
    # Fields of MLATransformerConfig without a flag, which Megatron takes from the namespace.
    assert set(values) - known <= {"original_max_position_embeddings", "beta_fast", "beta_slow"}


def fitted(words: list[str], config: dict[str, Any]) -> dict[str, Any]:
    parser = build_parser()
    args = parser.read(words)[0]
    return checkpoint_values(args, parser.given(words), architecture=architecture_of(config))


def test_flags_that_deny_the_checkpoint_are_errors_with_both_values():
    words = [
        *("--num-layers", "5", "--hidden-size=32", "--swiglu", "--attention-dropout", "0.1"),
        *("--disable-bias-linear", "--qk-layernorm", "--seq-length", "16"),
    ]
    with pytest.raises(ValueError, match="contradicts") as caught:
        fitted(words, LLAMA)
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert "--num-layers 5 contradicts the checkpoint, whose num_layers is 4" in lines[0]
    assert "--qk-layernorm contradicts the checkpoint, whose qk_layernorm is False" in lines[1]


def test_flags_win_over_what_the_checkpoint_only_suggests():
    values = fitted(["--attention-dropout", "0.1"], LLAMA)
    assert "attention_dropout" not in values
    assert values["hidden_dropout"] == 0.0
    assert values["num_layers"] == 4


@pytest.mark.parametrize(("frequency", "is_same"), [("2", True), ("([1,0]*2)", True), ("1", False)])
def test_layers_with_experts_in_any_spelling(frequency: str, is_same: bool):
    config = MOE | {"mlp_only_layers": [1, 3]}
    if is_same:
        fitted(["--moe-layer-freq", frequency], config)
    else:
        with pytest.raises(ValueError, match=r"moe_layer_freq is \[1, 0, 1, 0\]"):
            fitted(["--moe-layer-freq", frequency], config)
