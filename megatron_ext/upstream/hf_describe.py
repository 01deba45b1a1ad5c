"""A config.json for a model that Megatron's arguments describe, for export without a checkpoint.

The simplest family that has the model's parts is taken, and then checked: the description, mapped
back to Megatron's arguments, must give the same ones.  So a model that no family computes is
refused with the flags that no family has.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron_ext.upstream.hf_config import megatron_arguments
from megatron_ext.weights.families import architecture_of

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
"""transformers' class of each family that is written; Mistral's models are Llamas."""


def describe(args: Namespace) -> dict[str, Any]:
    """The fields of a config.json that stand for Megatron's (validated) arguments.

    Raises:
        ValueError: no family computes this model; the flags that stand in the way are listed.
    """
    family = _family(args)
    config = {
        "architectures": [_CLASSES[family]],
        "model_type": family,
        **_decoder(args),
        **(_latent(args) if args.multi_latent_attention else _attention(args, family)),
        **(_experts(args, family) if args.num_experts else {}),
    }
    try:
        expected = megatron_arguments(architecture_of(config), max_length=0)
    except ValueError as error:
        raise ValueError(f"this model cannot be written as a {family}: {error}") from error
    wrong = [
        f"{name} {getattr(args, name, None)}: a {family} has {value}."
        for name, value in expected.items()
        if not _is_same(name, getattr(args, name, None), value, args=args)
    ]
    if wrong:
        raise ValueError("\n  ".join([f"this model cannot be written as a {family}:", *wrong]))
    return config


def _family(args: Namespace) -> str:
    if args.multi_latent_attention:
        return "deepseek_v3" if args.moe_router_score_function == "sigmoid" else "deepseek_v2"
    if args.num_experts:
        return "qwen3_moe" if args.qk_layernorm else "mixtral"
    if args.qk_layernorm:
        return "qwen3"
    return "qwen2" if args.add_qkv_bias and not args.add_bias_linear else "llama"


def _decoder(args: Namespace) -> dict[str, Any]:
    return {
        "vocab_size": args.vocab_size,
        "hidden_size": args.hidden_size,
        "intermediate_size": args.ffn_hidden_size,
        "num_hidden_layers": args.num_layers,
        "num_attention_heads": args.num_attention_heads,
        "num_key_value_heads": _num_groups(args),
        "max_position_embeddings": args.max_position_embeddings,
        "rms_norm_eps": args.layernorm_epsilon,
        "hidden_act": "silu",
        "tie_word_embeddings": not args.untie_embeddings_and_output_weights,
        "rope_parameters": _rope(args),
    }


def _num_groups(args: Namespace) -> int:
    return args.num_query_groups if args.group_query_attention else args.num_attention_heads


def _rope(args: Namespace) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": float(args.rotary_base), "rope_type": "default"}
    if args.position_embedding_type == "yarn" or args.rope_type == "yarn":
        is_latent = args.multi_latent_attention
        prefix = "" if is_latent else "yarn_"
        original = f"{prefix}original_max_position_embeddings"
        rope |= {
            "rope_type": "yarn",
            "factor": args.rotary_scaling_factor,
            "original_max_position_embeddings": getattr(args, original, None) or 4096,
            "beta_fast": getattr(args, f"{prefix}beta_fast", None) or 32.0,
            "beta_slow": getattr(args, f"{prefix}beta_slow", None) or 1.0,
        }
        if args.mscale_all_dim:
            rope |= {"mscale": args.mscale, "mscale_all_dim": args.mscale_all_dim}
    elif args.use_rope_scaling:
        rope |= {
            "rope_type": "llama3",
            "factor": args.rope_scaling_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    elif args.rotary_seq_len_interpolation_factor is not None:
        rope |= {"rope_type": "linear", "factor": float(args.rotary_seq_len_interpolation_factor)}
    return rope


def _attention(args: Namespace, family: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"head_dim": args.kv_channels}
    if family == "llama":
        fields |= {"attention_bias": args.add_bias_linear, "mlp_bias": args.add_bias_linear}
    return fields


def _latent(args: Namespace) -> dict[str, Any]:
    return {
        "q_lora_rank": args.q_lora_rank,
        "kv_lora_rank": args.kv_lora_rank,
        "qk_nope_head_dim": args.qk_head_dim,
        "qk_rope_head_dim": args.qk_pos_emb_head_dim,
        "v_head_dim": args.v_head_dim,
    }


def _experts(args: Namespace, family: str) -> dict[str, Any]:
    if family == "mixtral":
        return {
            "num_local_experts": args.num_experts,
            "num_experts_per_tok": args.moe_router_topk,
            "intermediate_size": args.moe_ffn_hidden_size,
        }
    sparse = _sparse_layers(args)
    fields: dict[str, Any] = {
        "num_experts_per_tok": args.moe_router_topk,
        "moe_intermediate_size": args.moe_ffn_hidden_size,
    }
    if family == "qwen3_moe":
        return fields | {
            "num_experts": args.num_experts,
            "norm_topk_prob": not args.moe_router_pre_softmax,
            "mlp_only_layers": [layer for layer, is_sparse in enumerate(sparse) if not is_sparse],
        }
    shared = (args.moe_shared_expert_intermediate_size or 0) / args.moe_ffn_hidden_size
    fields |= {
        "n_routed_experts": args.num_experts,
        "n_shared_experts": int(shared),
        "first_k_dense_replace": sparse.index(1) if 1 in sparse else len(sparse),
        "routed_scaling_factor": args.moe_router_topk_scaling_factor or 1.0,
        "n_group": args.moe_router_num_groups or 1,
        "topk_group": args.moe_router_group_topk or 1,
    }
    if family == "deepseek_v2":
        method = "group_limited_greedy" if args.moe_router_group_topk else "greedy"
        return fields | {"topk_method": method, "norm_topk_prob": not args.moe_router_pre_softmax}
    return fields | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True}


def _sparse_layers(args: Namespace) -> list[int]:
    every = args.moe_layer_freq
    if isinstance(every, int):
        return [int(layer % every == 0) for layer in range(args.num_layers)]
    return list(every)


def _is_same(name: str, found: Any, expected: Any, *, args: Namespace) -> bool:
    if name in ("group_query_attention", "num_query_groups"):  # one head a group is none
        return True
    if name == "moe_layer_freq":
        return _sparse_layers(args) == expected
    if name == "ffn_hidden_size" and args.num_experts and all(_sparse_layers(args)):
        return True
    if name.endswith(("original_max_position_embeddings", "beta_fast", "beta_slow")):
        return found in (None, expected)
    if isinstance(expected, bool):
        return bool(found) == expected
    return found == expected
