"""The rotary fields of a config.json, new (``rope_parameters``) or old (``rope_scaling``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_ext.weights.architecture import Rope
from megatron_ext.weights.fields import Fields

_OTHER_KINDS = {"type", "finetuned", "short_factor", "long_factor"}
"""Read under another name, a remark, and of kinds that are refused."""


def rope(fields: Fields, *, theta: float, max_positions: int, is_interleaved: bool) -> Rope:
    """The rotary embedding; ``theta`` and ``max_positions`` are the family's defaults."""
    merged = _merged(fields, theta=theta)
    inner = Fields(merged)
    kind = inner.text("rope_type", default="default")
    trained = fields.integer("max_position_embeddings", default=max_positions)
    original = fields.optional_integer("original_max_position_embeddings", default=0)
    given = inner.optional_integer("original_max_position_embeddings", default=trained)
    original = original or given
    factor = 1.0
    if kind == "default" and inner.get("factor") not in (None, 1, 1.0):
        inner.problem(
            f"factor {inner.get('factor')} without a rope_type: transformers ignores it. Write the "
            "rope_type, or remove the factor."
        )
    if kind != "default":
        # A yarn without factor stretches from the original to the present length.
        default = {"default": trained / max(original, 1)} if kind == "yarn" else {}
        factor = inner.number("factor", **default)
    result = Rope(
        kind=kind,
        theta=inner.number("rope_theta"),
        factor=factor,
        original_positions=original if kind in ("llama3", "yarn", "longrope") else 0,
        low_freq_factor=inner.number("low_freq_factor", default=1.0),
        high_freq_factor=inner.number("high_freq_factor", default=4.0),
        beta_fast=inner.number("beta_fast", default=32.0),
        beta_slow=inner.number("beta_slow", default=1.0),
        mscale=inner.number("mscale", default=0.0, minimum=0.0),
        mscale_all_dim=inner.number("mscale_all_dim", default=0.0, minimum=0.0),
        attention_factor=inner.number("attention_factor", default=0.0, minimum=0.0),
        is_truncated=inner.flag("truncate", default=True),
        rotated_share=inner.number("partial_rotary_factor", default=1.0),
        is_interleaved=is_interleaved,
    )
    unknown = sorted(merged.keys() - inner.read - _OTHER_KINDS)
    if unknown:
        fields.problem(
            f"{', '.join(unknown)} in the rotary fields: not known here. Remove what has no effect "
            "in transformers."
        )
    for text in inner.problems:
        fields.problem(f"rotary fields: {text}")
    return result


def _merged(fields: Fields, *, theta: float) -> dict[str, Any]:
    """One object out of the old and the new form; inside the object wins, as in transformers."""
    merged: dict[str, Any] = {
        "rope_theta": fields.get("rope_theta") or theta,
        "partial_rotary_factor": fields.get("partial_rotary_factor"),
    }
    for name in ("rope_parameters", "rope_scaling"):
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            fields.problem(f"{name} is {value!r}, not an object.")
        elif any(isinstance(item, Mapping) for item in value.values()):
            fields.problem(f"{name} differs from layer to layer, which is not supported.")
        else:
            merged |= {key: item for key, item in value.items() if item is not None}
    merged.setdefault("rope_type", merged.get("type", "default"))
    return merged
