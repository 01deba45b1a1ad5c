"""config.json of any age reads as the same architecture; what is wrong is listed by name."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ext.weights.families import architecture_of
from tests.weights.tiny_models import BASE, LATENT, LLAMA3

LLAMA = {"model_type": "llama", **BASE}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    **BASE,
    **LATENT,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
        ),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {k: v for k, v in LLAMA3.items() if "theta" not in k},
            },
            {"rope_parameters": LLAMA3},
        ),
        ({"rope_scaling": None}, {"rope_parameters": None}),
    ],
)
def test_old_and_new_rotary_fields_are_the_same(old: dict[str, Any], new: dict[str, Any]):
    assert architecture_of(LLAMA | old) == architecture_of(LLAMA | new)


def test_yarn_without_a_factor_stretches_to_the_present_length():
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 16}
    assert architecture_of(LLAMA | {"rope_parameters": yarn}).rope.factor == 4.0


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"model_type": "mistral"}, 4096),
        ({"model_type": "mistral", "sliding_window": None}, 0),
        ({"model_type": "mixtral"}, 0),
        ({"model_type": "qwen2", "sliding_window": 8}, 0),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True}, 0),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 2,
            },
            8,
        ),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["full_attention"] * 3 + ["sliding_attention"],
            },
            8,
        ),
    ],
)
def test_sliding_window_counts_where_a_layer_uses_it(config: dict[str, Any], window: int):
    assert architecture_of(LLAMA | config).sliding_window == window


def test_groups_that_are_all_chosen_are_none():
    experts = architecture_of(DEEPSEEK | {"n_group": 1, "topk_group": 1}).experts
    assert experts is not None
    assert experts.groups is None


def test_everything_wrong_is_listed_at_once():
    config = {name: value for name, value in LLAMA.items() if name != "vocab_size"} | {
        "hidden_size": "big",
        "num_key_value_heads": 3,
        "rms_norm_eps": True,
        "tie_word_embeddings": "yes",
        "rope_parameters": {"rope_type": "llama3"},
        "num_hidden_layers": 10**9,
        "quantization_config": {"quant_method": "fp8"},
    }
    with pytest.raises(ValueError, match=r"config\.json \(llama\)") as caught:
        architecture_of(config)
    text = str(caught.value)
    for part in (
        "vocab_size is missing",
        "hidden_size is 'big', not an integer",
        "num_attention_heads 4 is not a multiple of num_key_value_heads 3",
        "rms_norm_eps is True, not a number",
        "tie_word_embeddings is 'yes', neither true nor false",
        "rotary fields: factor is missing",
        "num_hidden_layers is 1000000000",
        "the weights are quantised (fp8)",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"rope_interleave": False}, "rope_interleave false"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
        ({"model_type": "deepseek_v2", "norm_topk_prob": True}, "norm_topk_prob true"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "layer to layer"),
        ({"rope_scaling": 4}, "rope_scaling is 4, not an object"),
        ({"rope_scaling": {"factor": 4.0}}, r"factor 4\.0 without a rope_type"),
        ({"rope_scaling": {"new_key": 4.0}}, "new_key in the rotary fields: not known here"),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2: latent attention has as many"),
        ({"qk_rope_head_dim": 5}, "head size 5 is odd"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(config: dict[str, Any], text: str):
    with pytest.raises(ValueError, match=text):
        architecture_of(DEEPSEEK | config)
