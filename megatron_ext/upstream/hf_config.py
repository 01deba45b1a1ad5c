"""A checkpoint's architecture as values of Megatron's arguments, or why it cannot be expressed.

``megatron_arguments`` gives what the checkpoint fixes: a flag of the user that says otherwise is an
error (`hf_flags`).  ``training_defaults`` gives what it suggests: a flag of the user wins.
Invariant the tests check: a model built from these values has the logits of transformers; one wrong
value changes them.
"""

from __future__ import annotations

from typing import Any

from megatron_ext.upstream.hf_limits import limits
from megatron_ext.weights.architecture import Architecture, Experts, Latent, Rope


def megatron_arguments(
    architecture: Architecture, *, max_length: int | None = None
) -> dict[str, Any]:
    """Values of Megatron's parsed arguments that build this architecture, by destination.

    max_length: longest sequence of the run; None = the longest the checkpoint claims.

    Raises:
        ValueError: Megatron cannot express the architecture; every reason is listed.
    """
    wrong = limits(architecture, max_length=max_length)
    if wrong:
        raise ValueError(
            "\n  ".join(
                [f"config.json ({architecture.family}) asks for what is not built:", *wrong]
            )
        )
    values: dict[str, Any] = {
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "ffn_hidden_size": architecture.ffn_size,
        "num_attention_heads": architecture.num_heads,
        "kv_channels": architecture.head_size,
        "vocab_size": architecture.vocab_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": architecture.norm_epsilon,
        "layernorm_zero_centered_gamma": False,
        "swiglu": True,
        "add_bias_linear": architecture.mlp_bias,
        "add_qkv_bias": architecture.qkv_bias,
        "qk_layernorm": architecture.qk_norm or architecture.latent is not None,
        "untie_embeddings_and_output_weights": architecture.untied,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "rotary_base": _whole(architecture.rope.theta),
        "multi_latent_attention": architecture.latent is not None,
        "num_experts": architecture.experts.num_experts if architecture.experts else None,
    }
    if architecture.latent:
        values |= _latent_values(architecture.latent, architecture.rope)
    else:
        values |= {
            "group_query_attention": True,
            "num_query_groups": architecture.num_groups,
            **_rope_values(architecture.rope),
        }
    if architecture.converted:
        values |= {
            "latent_layout": architecture.converted.layout,
            "latent_pairs": architecture.converted.num_pairs,
            "latent_rank": architecture.converted.rank,
            "latent_query_rank": architecture.converted.query_rank,
        }
    return values | (_experts_values(architecture.experts) if architecture.experts else {})


def training_defaults(architecture: Architecture) -> dict[str, Any]:
    """Values that a checkpoint suggests and a flag of the user overrides, by destination."""
    values: dict[str, Any] = {
        "max_position_embeddings": architecture.max_positions,
        "attention_dropout": architecture.attention_dropout,
        "hidden_dropout": 0.0,
    }
    if architecture.experts and architecture.latent:
        values["moe_router_dtype"] = "fp32"  # as DeepSeek's own code computes the scores
    return values


def _whole(value: float) -> float:
    """A whole number as an int, as Megatron's own flags give it."""
    return int(value) if value == int(value) else value


def _rope_values(rope: Rope) -> dict[str, Any]:
    """Values for attention that is not latent."""
    values: dict[str, Any] = {
        "position_embedding_type": "yarn" if rope.kind == "yarn" else "rope",
        "use_rope_scaling": rope.kind == "llama3",
        "rotary_seq_len_interpolation_factor": None,
    }
    if rope.kind == "llama3":
        values["rope_scaling_factor"] = rope.factor
    if rope.kind == "linear":
        values["rotary_seq_len_interpolation_factor"] = _whole(rope.factor)
    if rope.kind == "yarn":
        values |= {
            "rotary_scaling_factor": rope.factor,
            "yarn_original_max_position_embeddings": rope.original_positions,
            "yarn_beta_fast": rope.beta_fast,
            "yarn_beta_slow": rope.beta_slow,
            **_yarn_mscales(rope),
        }
    return values


def _yarn_mscales(rope: Rope) -> dict[str, float]:
    """Megatron takes both; (1, 0) is the scale that follows from the factor alone."""
    if rope.mscale and rope.mscale_all_dim:
        return {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
    return {"mscale": 1.0, "mscale_all_dim": 0.0}


def _latent_values(latent: Latent, rope: Rope) -> dict[str, Any]:
    values: dict[str, Any] = {
        "group_query_attention": False,
        "position_embedding_type": "rope",
        "q_lora_rank": latent.query_rank or None,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.plain_size,
        "qk_pos_emb_head_dim": latent.rotary_size,
        "v_head_dim": latent.value_size,
        "rope_type": "yarn" if rope.kind == "yarn" else "rope",
        "rotary_scaling_factor": rope.factor,
        **_yarn_mscales(rope),
    }
    if rope.kind == "yarn":
        # No flags of Megatron, but its configuration takes them from here.
        values |= {
            "original_max_position_embeddings": rope.original_positions,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
        }
    return values


def _experts_values(experts: Experts) -> dict[str, Any]:
    return {
        "moe_ffn_hidden_size": experts.ffn_size,
        "moe_layer_freq": [int(is_sparse) for is_sparse in experts.sparse_layers],
        "moe_router_topk": experts.top_k,
        "moe_router_score_function": experts.score,
        # Softmax before the choice leaves the weights as they are, after it they sum to 1.
        "moe_router_pre_softmax": experts.score == "softmax" and not experts.is_normalised,
        "moe_router_topk_scaling_factor": None if experts.scale == 1.0 else experts.scale,
        "moe_router_num_groups": experts.groups.num_groups if experts.groups else None,
        "moe_router_group_topk": experts.groups.top_groups if experts.groups else None,
        "moe_router_enable_expert_bias": experts.has_bias,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_size or None,
    }
