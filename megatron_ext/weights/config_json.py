"""A checkpoint's config.json, of any age, read into an `Architecture`.

Fields that a config.json leaves out have the value that transformers gives them.  Both forms of the
rotary fields are understood: ``rope_parameters`` (transformers 5) and ``rope_theta`` with
``rope_scaling``.  Whether Megatron can express the result is not decided here.
Invariant the tests check: for every family, a config.json with nothing but the sizes reads as
transformers reads it.
"""

from __future__ import annotations

from typing import Any

from megatron_ext.weights.architecture import Architecture, Experts, Groups, Latent
from megatron_ext.weights.fields import Fields
from megatron_ext.weights.rope_json import rope

MAX_EXPERTS = 100_000


def llama(fields: Fields) -> Architecture:
    """Llama 1 to 3, SmolLM2 and other models of the same layout."""
    bias = fields.flag("attention_bias", default=False)
    return _decoder(
        fields,
        max_positions=2048,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", default=False),
    )


def mistral(fields: Fields) -> Architecture:
    """Mistral 7B and its successors of the same layout."""
    return _decoder(
        fields,
        max_positions=131072,
        num_groups=8,
        sliding_window=fields.optional_integer("sliding_window", default=4096),
    )


def qwen2(fields: Fields) -> Architecture:
    """Qwen2 and Qwen2.5."""
    return _decoder(
        fields,
        max_positions=32768,
        num_groups=32,
        qkv_bias=True,
        sliding_window=_qwen_window(fields),
    )


def qwen3(fields: Fields) -> Architecture:
    """Qwen3, dense."""
    bias = fields.flag("attention_bias", default=False)
    return _decoder(
        fields,
        max_positions=32768,
        num_groups=32,
        head_size=128,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        sliding_window=_qwen_window(fields),
    )


def qwen3_moe(fields: Fields) -> Architecture:
    """Qwen3 with mixture-of-experts layers."""
    bias = fields.flag("attention_bias", default=False)
    num_experts = fields.integer(
        "num_local_experts", "num_experts", default=128, maximum=MAX_EXPERTS
    )
    step = fields.integer("decoder_sparse_step", default=1)
    dense = fields.integers("mlp_only_layers", default=())
    sparse = [
        layer not in dense and num_experts > 0 and (layer + 1) % step == 0
        for layer in range(_num_layers(fields))
    ]
    return _decoder(
        fields,
        max_positions=32768,
        num_groups=4,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        sliding_window=_qwen_window(fields, all_layers=True),
        experts=Experts(
            num_experts=num_experts,
            top_k=fields.integer("num_experts_per_tok", default=8),
            ffn_size=fields.integer("moe_intermediate_size", default=768),
            sparse_layers=tuple(sparse),
            is_normalised=fields.flag("norm_topk_prob", default=False),
        ),
    )


def mixtral(fields: Fields) -> Architecture:
    """Mixtral 8x7B and 8x22B."""
    return _decoder(
        fields,
        max_positions=131072,
        num_groups=8,
        norm_epsilon=1e-5,
        rope_theta=1e6,
        sliding_window=fields.optional_integer("sliding_window", default=0),
        experts=Experts(
            num_experts=fields.integer(
                "num_local_experts", "num_experts", default=8, maximum=MAX_EXPERTS
            ),
            top_k=fields.integer("num_experts_per_tok", default=2),
            ffn_size=fields.integer("intermediate_size"),
            sparse_layers=(True,) * _num_layers(fields),
            is_normalised=True,
        ),
    )


def deepseek_v2(fields: Fields) -> Architecture:
    """DeepSeek-V2 and V2-Lite: softmax over all experts, the weights are not normalised.

    transformers never normalises them, DeepSeek's own code does if ``norm_topk_prob`` says so.
    """
    fields.choice("scoring_func", ("softmax",), default="softmax")
    method = fields.choice("topk_method", ("greedy", "group_limited_greedy"), default="greedy")
    groups = _groups(fields)
    if fields.flag("norm_topk_prob", default=False):
        fields.problem(
            "norm_topk_prob true: transformers and DeepSeek's own code disagree about it. Set it "
            "to false if the model was trained without."
        )
    return _decoder(
        fields,
        max_positions=2048,
        qkv_bias=fields.flag("attention_bias", default=False),
        mlp_bias=fields.flag("mlp_bias", default=False),
        latent=_latent(fields),
        experts=Experts(
            num_experts=fields.integer(
                "n_routed_experts", "num_experts", default=64, maximum=MAX_EXPERTS
            ),
            top_k=fields.integer("num_experts_per_tok"),
            ffn_size=fields.integer("moe_intermediate_size", default=1407),
            sparse_layers=_after_first(fields, default=0),
            is_normalised=False,
            scale=fields.number("routed_scaling_factor", default=1.0),
            groups=groups if method == "group_limited_greedy" else None,
            shared_ffn_size=_shared_size(fields, num_experts=2, ffn_size=1407),
        ),
    )


def deepseek_v3(fields: Fields) -> Architecture:
    """DeepSeek-V3, V3.1 and R1: sigmoid scores, a bias for the choice, limited to groups."""
    fields.choice("scoring_func", ("sigmoid",), default="sigmoid")
    fields.choice("topk_method", ("noaux_tc",), default="noaux_tc")
    if not fields.flag("rope_interleave", default=True):
        fields.problem("rope_interleave false: only interleaved rotary positions are supported.")
    return _decoder(
        fields,
        max_positions=4096,
        qkv_bias=fields.flag("attention_bias", default=False),
        latent=_latent(fields),
        experts=Experts(
            num_experts=fields.integer(
                "n_routed_experts", "num_local_experts", default=256, maximum=MAX_EXPERTS
            ),
            top_k=fields.integer("num_experts_per_tok", default=8),
            ffn_size=fields.integer("moe_intermediate_size", default=2048),
            sparse_layers=_after_first(fields, default=3),
            score="sigmoid",
            is_normalised=fields.flag("norm_topk_prob", default=True),
            scale=fields.number("routed_scaling_factor", default=2.5),
            groups=_groups(fields, num_groups=8, top_groups=4, score_experts=2),
            has_bias=True,
            shared_ffn_size=_shared_size(fields, num_experts=1, ffn_size=2048),
        ),
    )


def _decoder(
    fields: Fields,
    *,
    max_positions: int,
    num_groups: int = 0,
    head_size: int = 0,
    norm_epsilon: float = 1e-6,
    rope_theta: float = 1e4,
    latent: Latent | None = None,
    **traits: Any,
) -> Architecture:
    """What all families have; the keywords are the family's defaults and traits."""
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    if latent is None:
        if "num_key_value_heads" in fields.config and fields.get("num_key_value_heads") is None:
            num_groups = num_heads
        num_groups = fields.integer("num_key_value_heads", default=num_groups or num_heads)
        head_size = fields.integer("head_dim", default=head_size or hidden_size // num_heads)
        rotated = head_size
    else:
        num_groups = fields.integer("num_key_value_heads", default=num_heads)
        head_size, rotated = latent.value_size, latent.rotary_size
        if num_groups != num_heads:
            fields.problem(
                f"num_key_value_heads {num_groups}: latent attention has as many as "
                f"num_attention_heads, {num_heads}."
            )
    if num_groups and num_heads % num_groups:
        fields.problem(
            f"num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {num_groups}."
        )
    if rotated % 2:
        fields.problem(f"head size {rotated} is odd: rotary positions need pairs.")
    fields.refuse_quantised()
    traits.setdefault("sliding_window", fields.optional_integer("sliding_window", default=0))
    return Architecture(
        family=fields.text("model_type"),
        num_layers=_num_layers(fields),
        hidden_size=hidden_size,
        ffn_size=fields.integer("intermediate_size"),
        num_heads=num_heads,
        num_groups=num_groups,
        head_size=head_size,
        vocab_size=fields.integer("vocab_size"),
        max_positions=fields.integer("max_position_embeddings", default=max_positions),
        norm_epsilon=fields.number("rms_norm_eps", default=norm_epsilon),
        activation=fields.text("hidden_act", default="silu"),
        tied=fields.flag("tie_word_embeddings", default=False),
        rope=rope(
            fields, theta=rope_theta, max_positions=max_positions, is_interleaved=latent is not None
        ),
        attention_dropout=fields.share("attention_dropout", default=0.0),
        latent=latent,
        **traits,
    )


def _num_layers(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", maximum=10_000)


def _qwen_window(fields: Fields, *, all_layers: bool = False) -> int:
    """The window, if it is switched on and a layer uses it."""
    window = fields.optional_integer("sliding_window", default=4096)
    kinds = fields.texts("layer_types", default=())
    first = fields.integer("max_window_layers", default=28, minimum=0)
    if not fields.flag("use_sliding_window", default=False):
        return 0
    if all_layers:
        return window
    if kinds:
        return window if "sliding_attention" in kinds else 0
    return window if first < _num_layers(fields) else 0


def _latent(fields: Fields) -> Latent:
    return Latent(
        query_rank=fields.optional_integer("q_lora_rank", default=1536),
        kv_rank=fields.integer("kv_lora_rank", default=512),
        plain_size=fields.integer("qk_nope_head_dim", default=128),
        rotary_size=fields.integer("qk_rope_head_dim", default=64),
        value_size=fields.integer("v_head_dim", default=128),
    )


def _after_first(fields: Fields, *, default: int) -> tuple[bool, ...]:
    """Sparse layers of DeepSeek: all but the first few, or every so many of them."""
    first = fields.integer("first_k_dense_replace", default=default, minimum=0)
    every = fields.integer("moe_layer_freq", default=1)
    layers = range(_num_layers(fields))
    return tuple(layer >= first and layer % every == 0 for layer in layers)


def _shared_size(fields: Fields, *, num_experts: int, ffn_size: int) -> int:
    count = fields.optional_integer("n_shared_experts", default=num_experts)
    return count * fields.integer("moe_intermediate_size", default=ffn_size)


def _groups(
    fields: Fields, *, num_groups: int = 0, top_groups: int = 0, score_experts: int = 1
) -> Groups | None:
    groups = Groups(
        num_groups=fields.optional_integer("n_group", default=num_groups),
        top_groups=fields.optional_integer("topk_group", default=top_groups),
        score_experts=score_experts,
    )
    return None if groups.num_groups == groups.top_groups else groups
