"""What a checkpoint may ask for that Megatron's GPT model does not compute, by the field's name."""

from __future__ import annotations

import math

from megatron_ext.weights.architecture import Architecture, Experts, Groups, Rope

LATENT_NORM_EPSILON = 1e-6
"""DeepSeek's latents are normalised with this epsilon, whatever rms_norm_eps says."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_positions": 8192}
"""The constants of Llama 3's scaling that Megatron has built in."""


def limits(architecture: Architecture, *, max_length: int | None = None) -> list[str]:
    """Every reason why Megatron cannot express an architecture; none if it can.

    max_length: longest sequence of the run; None = the longest the checkpoint claims.
    """
    return [
        *_decoder_problems(architecture),
        *_window_problems(architecture, max_length),
        *_position_problems(architecture),
        *(_experts_problems(architecture.experts) if architecture.experts else ()),
    ]


def _decoder_problems(architecture: Architecture) -> list[str]:
    wrong = []
    if architecture.activation not in ("silu", "swish"):
        wrong.append(f"hidden_act {architecture.activation!r}: only silu is built.")
    if architecture.latent:
        if architecture.qkv_bias or architecture.mlp_bias:
            wrong.append("attention_bias or mlp_bias true: latent attention is built without.")
        if architecture.norm_epsilon != LATENT_NORM_EPSILON:
            wrong.append(
                f"rms_norm_eps {architecture.norm_epsilon:g}: the latents are normalised with "
                f"{LATENT_NORM_EPSILON:g}, and Megatron has one epsilon for all norms."
            )
    elif architecture.output_bias != architecture.mlp_bias and not architecture.converted:
        wrong.append(
            f"attention_bias {str(architecture.output_bias).lower()} with mlp_bias "
            f"{str(architecture.mlp_bias).lower()}: the attention's output and the MLP have "
            "biases only together."
        )
    return wrong


def _window_problems(architecture: Architecture, max_length: int | None) -> list[str]:
    length = architecture.max_positions if max_length is None else max_length
    window = architecture.sliding_window
    if window == 0 or window >= length:
        return []
    return [
        f"sliding_window {window}: sliding windows are not built, and sequences of {length} "
        f"positions need one. Use --seq-length {window} or less, where no window takes effect."
    ]


def _position_problems(architecture: Architecture) -> list[str]:
    """Of RoPE as Megatron has it; converted attention brings its frequencies with its weights."""
    if architecture.converted:
        return []
    return _rope_problems(architecture.rope, is_latent=architecture.latent is not None)


def _rope_problems(rope: Rope, *, is_latent: bool) -> list[str]:
    known = ("default", "yarn") if is_latent else ("default", "linear", "llama3", "yarn")
    if rope.kind not in known:
        return [f"rope_type {rope.kind!r}: known here are {', '.join(known)}."]
    wrong = []
    if rope.rotated_share != 1.0:
        wrong.append(f"partial_rotary_factor {rope.rotated_share:g}: only whole heads are rotated.")
    if rope.kind == "llama3":
        wrong += [
            f"rope {name} {getattr(rope, name):g}: Megatron's Llama 3 scaling has {value:g} built "
            "in."
            for name, value in _LLAMA3.items()
            if getattr(rope, name) != value
        ]
    if rope.kind == "yarn":
        wrong += _yarn_problems(rope)
    return wrong


def _yarn_problems(rope: Rope) -> list[str]:
    wrong = []
    if not rope.is_truncated:
        wrong.append("rope truncate false: yarn's ramp is built with whole dimensions.")
    if rope.mscale_all_dim and not rope.mscale:
        wrong.append("rope mscale_all_dim without mscale: yarn needs both or none.")
    derived = rope.yarn_scale
    if rope.attention_factor and not math.isclose(rope.attention_factor, derived, rel_tol=1e-6):
        wrong.append(
            f"rope attention_factor {rope.attention_factor:g}: built is the one that follows from "
            f"the factor, {derived:g}."
        )
    return wrong


def _experts_problems(experts: Experts) -> list[str]:
    wrong = []
    if experts.top_k > experts.num_experts:
        wrong.append(f"num_experts_per_tok {experts.top_k} of {experts.num_experts} experts.")
    if experts.top_k == 1 and experts.is_normalised:
        wrong.append(
            "num_experts_per_tok 1 with normalised weights: the weight would always be 1, which "
            "Megatron does not build."
        )
    if experts.score == "sigmoid" and experts.top_k > 1 and not experts.is_normalised:
        wrong.append("norm_topk_prob false: Megatron always normalises sigmoid weights.")
    if experts.groups:
        wrong += _group_problems(experts, experts.groups)
    return wrong


def _group_problems(experts: Experts, groups: Groups) -> list[str]:
    size, rest = divmod(experts.num_experts, max(groups.num_groups, 1))
    if rest or size < groups.score_experts or not 0 < groups.top_groups < groups.num_groups:
        return [
            f"n_group {groups.num_groups} and topk_group {groups.top_groups} are no groups of "
            f"{experts.num_experts} experts."
        ]
    scored = experts.top_k // groups.top_groups
    if scored == groups.score_experts:
        return []
    return [
        f"topk_group {groups.top_groups} with num_experts_per_tok {experts.top_k}: Megatron "
        f"scores a group by its best {scored} experts, this family by its best "
        f"{groups.score_experts}."
    ]
