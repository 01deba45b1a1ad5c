"""The metadata of a Llama's GGUF file as the fields of a config.json, read as llama.cpp reads it.

Every ``llama.`` key is honoured, known to change nothing, or refused by name: a key of a newer
llama.cpp can change what the model computes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

ROPE_FACTORS = "rope_freqs.weight"
_FIELDS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "vocab_size": "vocab_size",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
}
"""Fields of a config.json and the keys that hold them, after ``llama.``."""
_ROPE = (
    "rope.dimension_count",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
)
_WITHOUT_EFFECT = ("rope.scaling.finetuned", "pooling_type")
"""A remark, and what embeddings of whole texts are made of."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.sliding_window": (0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.alpha": (0.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}
"""Keys that change what the model computes, with the values under which they do not."""
_END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "<|end_of_text|>",
        "<end_of_utterance>",
    }
)
"""Tokens that llama.cpp takes for the end of a response by their text."""


def config_of(metadata: Mapping[str, Any], problems: list[str], *, is_tied: bool) -> dict[str, Any]:
    """The fields of a config.json; problems: gets what is not built."""
    kind = metadata.get("general.architecture")
    if kind != "llama" or metadata.get("llama.expert_count"):
        problems.append(
            f"the model is a {kind!r}{' with experts' if kind == 'llama' else ''}: only Llama "
            "models are read from GGUF. Use the safetensors checkpoint."
        )
        return {}
    config = {name: metadata.get(f"llama.{key}") for name, key in _FIELDS.items()}
    if config["vocab_size"] is None:
        config["vocab_size"] = len(metadata.get("tokenizer.ggml.tokens", ())) or None
    if config["num_key_value_heads"] is None:
        config["num_key_value_heads"] = config["num_attention_heads"]
    if config["head_dim"] is None:
        config["head_dim"] = metadata.get("llama.rope.dimension_count")
    config = {name: value for name, value in config.items() if value is not None}
    for name in ("num_attention_heads", "num_key_value_heads"):
        if not isinstance(config.get(name), int) or config[name] < 1:
            problems.append(f"its metadata has no {name}. Download it again.")
    problems += _unknown_keys(metadata) + _head_problems(metadata, config)
    return config | {
        **_rope_scaling(metadata, problems),
        **_special_ids(metadata),
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "tie_word_embeddings": is_tied,
        "dtype": "float32",
    }


def _unknown_keys(metadata: Mapping[str, Any]) -> list[str]:
    """Keys of the architecture that are neither honoured nor without effect."""
    honoured = {*_FIELDS.values(), *_ROPE, *_WITHOUT_EFFECT, "attention.value_length"}
    found = []
    for name, value in metadata.items():
        key = name.removeprefix("llama.")
        if key == name or key in honoured:
            continue
        neutral = _NEUTRAL.get(key)
        if neutral is None:
            found.append(f"{name} {value}: not known here. Use the safetensors checkpoint.")
        elif value not in neutral:
            found.append(
                f"{name} {value}: only {neutral[0]} is built. Use the safetensors checkpoint."
            )
    return found


def _head_problems(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """llama.cpp refuses a Llama whose heads are not rotated whole."""
    size = config.get("head_dim")
    keys = ("llama.rope.dimension_count", "llama.attention.value_length")
    return [
        f"{key} {metadata[key]}: heads have {size} widths, and other sizes of a part are not "
        "built. Use the safetensors checkpoint."
        for key in keys
        if metadata.get(key, size) != size
    ]


def _rope_scaling(metadata: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """rope_scaling, if the positions are scaled; llama.cpp's default type is linear."""

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"llama.rope.{key}", default)

    not_numbers = [
        f"llama.{key} {metadata[f'llama.{key}']!r}: not a number. Download the file again."
        for key in _ROPE
        if key != "rope.scaling.type" and not _is_number(metadata.get(f"llama.{key}", 0))
    ]
    if not_numbers:
        problems += not_numbers
        return {}
    kind, factor = get("scaling.type", "linear"), get("scaling.factor", get("scale_linear", 0.0))
    weight = get("scaling.attn_factor", 1.0) * get("scaling.yarn_attn_factor", 1.0)
    if kind == "none" or (kind in ("linear", "yarn") and factor in (0.0, 1.0)):
        kind, factor = "default", 1.0
    if weight != 1.0 and kind != "yarn":
        problems.append(
            f"llama.rope.scaling.attn_factor {weight:g}: built with yarn only. Use the "
            "safetensors checkpoint."
        )
    if kind == "default":
        return {}
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling |= {
            "original_max_position_embeddings": get("scaling.original_context_length"),
            "beta_fast": get("scaling.yarn_beta_fast"),
            "beta_slow": get("scaling.yarn_beta_slow"),
        }
        if weight != 1.0:  # llama.cpp's is a factor on the one that follows from the scaling
            scaling["attention_factor"] = weight * (1.0 + 0.1 * math.log(factor))
    return {"rope_scaling": {name: value for name, value in scaling.items() if value is not None}}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _special_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    bos, pad = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "padding"))
    ends = end_ids(metadata)
    found = {
        "bos_token_id": bos,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": pad,
    }
    return {name: value for name, value in found.items() if value is not None}


def end_ids(metadata: Mapping[str, Any]) -> list[int]:
    """The tokens that end a response, as llama.cpp has them: by their keys, or by their texts.

    Not its fill-in-the-middle tokens and not the texts of models that are no Llamas.
    """
    named = [metadata.get(f"tokenizer.ggml.{name}") for name in _END_IDS]
    texts = metadata.get("tokenizer.ggml.tokens", ())
    by_text = [id for id, text in enumerate(texts) if text in _END_TEXTS]
    return list(dict.fromkeys(id for id in [*named, *by_text] if isinstance(id, int)))


def llama3_scaling(
    factors: np.ndarray, config: Mapping[str, Any], problems: list[str]
) -> dict[str, Any]:
    """Llama 3.1's scaling, which GGUF keeps as one divisor for each frequency.

    It is taken over only if it is exactly the scaling of Llama 3.1 to 3.3 with some factor.
    """
    if "rope_scaling" in config:
        problems.append(
            f"{ROPE_FACTORS} beside llama.rope.scaling: both scale the positions, which is not "
            "built. Use the safetensors checkpoint."
        )
        return {}
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    factor = float(factors.max())
    waves = [
        2 * math.pi * config.get("rope_theta", 10000.0) ** (2 * i / size) for i in range(size // 2)
    ]
    expected = []
    for wave in waves:
        smooth = min(max((8192 / wave - 1.0) / (4.0 - 1.0), 0.0), 1.0)
        expected.append(1 / ((1 - smooth) / factor + smooth))
    if len(expected) != len(factors) or not np.allclose(expected, factors, rtol=1e-3):
        problems.append(
            f"{ROPE_FACTORS} is not the scaling of Llama 3.1: its rotary positions cannot be "
            "expressed. Use the safetensors checkpoint."
        )
        return {}
    return {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    }
