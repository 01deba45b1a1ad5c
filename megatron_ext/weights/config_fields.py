"""Fields of a config.json that no reader asks for: without effect, refused, or unknown.

Every field that transformers reads for our families is read by a family's reader, or stands in one
of the two tables here; a test takes the list of fields from transformers itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_ext.weights.fields import Fields

_OUTPUT = "what a forward pass returns"
_CLASSIFIER = "of classification heads, whose tensors are refused"
_TRAINING = "of training, which has flags of its own"
_NAMES = "names and versions"
_TOKENIZER = "of the tokenizer and of generation"
_RUNTIME = "how it is computed, not what"
_MTP = "of multi-token-prediction layers, whose tensors are refused or dropped on request"
WITHOUT_EFFECT: Mapping[str, str] = {
    **dict.fromkeys(("output_hidden_states", "output_attentions", "return_dict"), _OUTPUT),
    **dict.fromkeys(("output_router_logits", "use_cache", "torchscript"), _OUTPUT),
    **dict.fromkeys(("id2label", "label2id", "num_labels", "problem_type"), _CLASSIFIER),
    **dict.fromkeys(("finetuning_task", "classifier_dropout"), _CLASSIFIER),
    **dict.fromkeys(("initializer_range", "init_std", "initializer_factor"), _TRAINING),
    **dict.fromkeys(("router_aux_loss_coef", "router_jitter_noise", "aux_loss_alpha"), _TRAINING),
    **dict.fromkeys(("seq_aux", "gradient_checkpointing"), _TRAINING),
    **dict.fromkeys(("architectures", "auto_map", "model_type", "name_or_path"), _NAMES),
    **dict.fromkeys(("transformers_version", "dtype", "torch_dtype"), _NAMES),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id"), _TOKENIZER),
    **dict.fromkeys(("pretraining_tp", "ep_size", "chunk_size_feed_forward"), _RUNTIME),
    **dict.fromkeys(("distributed_config", "fusion_config", "sub_configs"), _RUNTIME),
    **dict.fromkeys(("base_model_tp_plan", "base_model_pp_plan"), _RUNTIME),
    **dict.fromkeys(("num_mtp_layers", "num_nextn_predict_layers"), _MTP),
    "kv_sharing_modes": "derived by transformers from the model's class",
}
"""Fields that may have any value, with the reason.  Stop ids are read elsewhere (`stop_ids`)."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention_chunk_size": (None,),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
    "per_layer_config": (None, {}, []),
    "rope_interleaved": (False, None),
    "transformers_weights": (None,),
    "use_bidirectional_attention": (False, None),
}
"""Fields that change what the model computes, with the values under which they do not."""
_OF_LATENT: Mapping[str, str] = {
    "head_dim": "transformers sets it to qk_rope_head_dim",
    "qk_head_dim": "the sum of the two parts",
}
_OF_US = ("base_model_type", "latent_attention")
_LAYER_TYPES = {"full_attention", "sliding_attention"}
"""Of `layer_types`: a sliding window of any layer is refused by itself."""


def check_others(fields: Fields, *, is_latent: bool) -> list[str]:
    """Names of the fields that nobody reads; those that may not be there become problems.

    Call it after the family's reader, which has asked for the others.
    """
    unknown = []
    _check_layer_types(fields, fields.config.get("layer_types"))
    for name, value in fields.config.items():
        if name in fields.read or name.startswith("_") or name in (*_OF_US, *WITHOUT_EFFECT):
            continue
        if name in NEUTRAL:
            if value not in NEUTRAL[name]:
                fields.problem(f"{name} {value!r}: only {NEUTRAL[name][0]!r} is built.")
        elif value is not None and not has_place(name, is_latent=is_latent):
            unknown.append(name)
    return unknown


def _check_layer_types(fields: Fields, value: Any) -> None:
    kinds = value if isinstance(value, list) else [value]
    wrong = [str(kind) for kind in kinds if kind is not None and str(kind) not in _LAYER_TYPES]
    if wrong:
        fields.problem(f"layer_types has {wrong[0]!r}: only full attention is built.")


def has_place(name: str, *, is_latent: bool) -> bool:
    """Whether a field that no reader asks for has been thought of."""
    known = {*WITHOUT_EFFECT, *NEUTRAL, "layer_types"}
    return name.startswith("_") or name in known or (is_latent and name in _OF_LATENT)
