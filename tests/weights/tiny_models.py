"""Tiny random models of every family, made and saved by transformers, with their logits.

Nothing in them is trivial: norms and biases are random, head sizes are not hidden / heads, the
vocabulary is no multiple of anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

BASE: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """A family's configuration beside BASE."""

    family: str
    config: Mapping[str, Any]


MODELS = {
    "llama": Tiny(family="llama", config={"head_dim": 12}),
    "llama tied biased": Tiny(
        family="llama",
        config={"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama 3.2": Tiny(family="llama", config={"rope_parameters": LLAMA3, "head_dim": 24}),
    "llama linear": Tiny(
        family="llama",
        config={"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "mistral": Tiny(family="mistral", config={"head_dim": 12, "rms_norm_eps": 1e-5}),
    "qwen2": Tiny(family="qwen2", config={"tie_word_embeddings": True}),
    "qwen2 yarn": Tiny(family="qwen2", config={"rope_parameters": YARN}),
    "qwen3": Tiny(family="qwen3", config={"head_dim": 12}),
    "qwen3_moe": Tiny(
        family="qwen3_moe",
        config={
            "head_dim": 12,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
    "qwen3_moe unnormalised": Tiny(
        family="qwen3_moe",
        config={
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral": Tiny(
        family="mixtral",
        config={"head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek_v2": Tiny(
        family="deepseek_v2",
        config={
            **LATENT,
            "q_lora_rank": None,
            "n_routed_experts": 4,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 1.3,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v3": Tiny(
        family="deepseek_v3",
        config={
            **LATENT,
            "q_lora_rank": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "deepseek_v3 yarn": Tiny(
        family="deepseek_v3",
        config={
            **LATENT,
            "q_lora_rank": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 4,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
        },
    ),
}
WITH_EXPERTS = [name for name, tiny in MODELS.items() if "num_experts_per_tok" in tiny.config]


def tokens() -> Tensor:
    """The token ids that the logits are of, [2, 20]."""
    return torch.randint(0, BASE["vocab_size"], (2, 20), generator=torch.Generator().manual_seed(1))


def build(tiny: Tiny, *, seed: int = 0) -> Any:
    """A model of transformers with random weights; norms around 1, choice biases around 0."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(tiny.family, **(BASE | dict(tiny.config)))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name
            parameter.normal_(mean=1.0 if is_norm else 0.0, std=0.3 if is_norm else 0.12)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.normal_(std=0.3)
    return model


def save(tiny: Tiny, folder: Path, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Save a model's checkpoint; its logits in float32, [2, 20, V]."""
    model = build(tiny)
    biases = {name: b.clone() for name, b in model.named_buffers() if "correction_bias" in name}
    model.to(dtype)
    for name, bias in biases.items():  # in float32, as DeepSeek publishes it
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, bias)
    model.save_pretrained(folder)
    if dtype != torch.float32:  # .to() has rounded the rotary frequencies too
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        ).eval()
    with torch.no_grad():
        return model(tokens()).logits
