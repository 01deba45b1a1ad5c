"""Pieces that the families' tables share: the rows of each part of a decoder."""

from __future__ import annotations

from typing import Any

from megatron_ext.weights.table import (
    EXPERT,
    LAYER,
    Make,
    Row,
    gate_up,
    grouped_heads,
    replicated,
    split_columns,
    split_rows,
    vocabulary,
)

HF = "model.layers.{layer}."
HF_ATTENTION = HF + "self_attn."


def row(parameter: str, make: Make, **options: Any) -> Row:
    """A row outside the layers."""
    return Row(parameter=parameter, make=make, **options)


def layer(parameter: str, make: Make, **options: Any) -> Row:
    """A row of every layer."""
    return Row(parameter=LAYER + parameter, make=make, **options)


def attention(parameter: str, make: Make, **options: Any) -> Row:
    """A row of every layer's attention."""
    return Row(parameter=LAYER + "self_attention." + parameter, make=make, **options)


EMBEDDING = (row("embedding.word_embeddings.weight", vocabulary("model.embed_tokens.weight")),)
OUTPUT = (
    row("decoder.final_layernorm.weight", replicated("model.norm.weight", "hidden_size")),
    row("output_layer.weight", vocabulary("lm_head.weight"), only="untied"),
    # With a pipeline, the last stage has a copy of the tied embedding.
    row(
        "output_layer.weight",
        vocabulary("model.embed_tokens.weight"),
        only="tied",
        is_copy=True,
    ),
)
NORMS = (
    layer("input_layernorm.weight", replicated(HF + "input_layernorm.weight", "hidden_size")),
    layer(
        "pre_mlp_layernorm.weight",
        replicated(HF + "post_attention_layernorm.weight", "hidden_size"),
    ),
)
PROJECTION = (
    attention(
        "linear_proj.weight",
        split_columns(HF_ATTENTION + "o_proj.weight", "hidden_size", "attention_size"),
    ),
)
ATTENTION = (
    attention("linear_qkv.weight", grouped_heads(HF_ATTENTION + "{qkv}_proj.weight")),
    attention(
        "linear_qkv.bias",
        grouped_heads(HF_ATTENTION + "{qkv}_proj.bias", is_bias=True),
        only="qkv_bias",
    ),
    *PROJECTION,
    attention(
        "linear_proj.bias",
        replicated(HF_ATTENTION + "o_proj.bias", "hidden_size"),
        only="output_bias",
    ),
)
QK_NORMS = (
    attention("q_layernorm.weight", replicated(HF_ATTENTION + "q_norm.weight", "head_size")),
    attention("k_layernorm.weight", replicated(HF_ATTENTION + "k_norm.weight", "head_size")),
)
LATENT_ATTENTION = (
    attention(
        "linear_q_proj.weight",
        split_rows(HF_ATTENTION + "q_proj.weight", "query_size", "hidden_size"),
        only="direct_query",
    ),
    attention(
        "linear_q_down_proj.weight",
        split_rows(HF_ATTENTION + "q_a_proj.weight", "query_rank", "hidden_size"),
        only="query_latent",
    ),
    attention(
        "q_layernorm.weight",
        replicated(HF_ATTENTION + "q_a_layernorm.weight", "query_rank"),
        only="query_latent",
    ),
    attention(
        "linear_q_up_proj.weight",
        split_rows(HF_ATTENTION + "q_b_proj.weight", "query_size", "query_rank"),
        only="query_latent",
    ),
    attention(
        "linear_kv_down_proj.weight",
        split_rows(HF_ATTENTION + "kv_a_proj_with_mqa.weight", "kv_down_size", "hidden_size"),
    ),
    attention("kv_layernorm.weight", replicated(HF_ATTENTION + "kv_a_layernorm.weight", "kv_rank")),
    attention(
        "linear_kv_up_proj.weight",
        split_rows(HF_ATTENTION + "kv_b_proj.weight", "kv_up_size", "kv_rank"),
    ),
    *PROJECTION,
)

CONVERTED_ATTENTION = (
    attention(
        "linear_q_down.weight",
        replicated(HF_ATTENTION + "q_a_proj.weight", "query_rank", "hidden_size"),
        only="converted_query_latent",
    ),
    attention(
        "linear_q.weight", split_rows(HF_ATTENTION + "q_proj.weight", "query_size", "query_input")
    ),
    attention(
        "linear_q.bias", split_rows(HF_ATTENTION + "q_proj.bias", "query_size"), only="qkv_bias"
    ),
    attention(
        "linear_kv_down.weight",
        replicated(HF_ATTENTION + "kv_a_proj.weight", "kv_down_size", "hidden_size"),
    ),
    attention(
        "key_rotary_bias", replicated(HF_ATTENTION + "k_rope.bias", "rotary_size"), only="qkv_bias"
    ),
    attention(
        "linear_kv_up.weight",
        split_rows(HF_ATTENTION + "kv_b_proj.weight", "kv_up_size", "kv_rank"),
    ),
    attention(
        "query_norm",
        split_rows(HF_ATTENTION + "q_norm.weight", "num_groups", "key_width"),
        only="qk_norm",
    ),
    attention(
        "key_norm",
        split_rows(HF_ATTENTION + "k_norm.weight", "num_groups", "key_width"),
        only="qk_norm",
    ),
    attention(
        "frequency_bits",
        replicated(HF_ATTENTION + "rope_frequencies", "num_rotary_keys", "num_pairs"),
        is_float32=True,
        is_bits=True,
    ),
    *PROJECTION,
    attention(
        "linear_proj.bias",
        replicated(HF_ATTENTION + "o_proj.bias", "hidden_size"),
        only="converted_output_bias",
    ),
)
"""Attention that `megatron_ext.mla` has converted, in the place of `ATTENTION` and `QK_NORMS`.

Rows of queries and keys: by head the rotary widths, real parts before imaginary ones, then the
plain ones.
"""


def gated_mlp(
    megatron: str,
    hf: str,
    size: str,
    *,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    **options: Any,
) -> tuple[Row, Row]:
    """Weights of a gated MLP: gate and up stacked, down split by columns."""
    gate, up, down = (f"{HF}{hf}{name}.weight" for name in names)
    return (
        layer(megatron + "linear_fc1.weight", gate_up(gate, up, size, "hidden_size"), **options),
        layer(megatron + "linear_fc2.weight", split_columns(down, "hidden_size", size), **options),
    )


def router(name: str) -> Row:
    """The router of every layer with experts."""
    return layer(
        "mlp.router.weight", replicated(HF + name, "num_experts", "hidden_size"), layers="sparse"
    )


DENSE_MLP = gated_mlp("mlp.", "mlp.", "ffn_size", layers="dense")
MLP_BIAS = (
    layer(
        "mlp.linear_fc1.bias",
        gate_up(HF + "mlp.gate_proj.bias", HF + "mlp.up_proj.bias", "ffn_size"),
        only="mlp_bias",
    ),
    layer(
        "mlp.linear_fc2.bias",
        replicated(HF + "mlp.down_proj.bias", "hidden_size"),
        only="mlp_bias",
    ),
)
EXPERTS = (
    router("mlp.gate.weight"),
    *gated_mlp(EXPERT, "mlp.experts.{expert}.", "expert_ffn_size", layers="sparse"),
)
SHARED_EXPERTS = gated_mlp(
    "mlp.shared_experts.",
    "mlp.shared_experts.",
    "shared_ffn_size",
    only="shared_experts",
    layers="sparse",
)
CHOICE_BIAS = (
    layer(
        "mlp.router.expert_bias",
        replicated(HF + "mlp.gate.e_score_correction_bias", "num_experts"),
        only="expert_bias",
        layers="sparse",
        is_float32=True,
    ),
)
MIXTRAL_EXPERTS = (
    router("block_sparse_moe.gate.weight"),
    *gated_mlp(
        EXPERT,
        "block_sparse_moe.experts.{expert}.",
        "expert_ffn_size",
        names=("w1", "w3", "w2"),
        layers="sparse",
    ),
)
