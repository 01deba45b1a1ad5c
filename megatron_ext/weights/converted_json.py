"""The config.json of a checkpoint whose attention `megatron_ext.mla` has converted.

It is that of the original with a ``model_type`` of its own and the sizes of the latent; every other
field keeps its meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_ext.weights.architecture import Architecture, Converted
from megatron_ext.weights.fields import Fields

CONVERTED = "mha2mla"
"""``model_type`` of converted attention, so that nothing takes it for the family it was."""
BASE = "base_model_type"
"""The field with that family."""


def converted_config(config: Mapping[str, Any], converted: Converted) -> dict[str, Any]:
    """The config.json of a checkpoint whose attention was converted, from that of the original."""
    return {
        **{name: value for name, value in config.items() if name != "auto_map"},
        "model_type": CONVERTED,
        BASE: config["model_type"],
        "architectures": ["MHA2MLAForCausalLM"],
        "latent_attention": {
            "layout": converted.layout,
            "rope_pairs": converted.num_pairs,
            "kv_rank": converted.rank,
            "q_rank": converted.query_rank,
        },
    }


def read_converted(fields: Fields, original: Architecture) -> Converted | None:
    """What ``latent_attention`` says of attention that `megatron_ext.mla` has converted."""
    found = fields.config.get("latent_attention")
    if not isinstance(found, Mapping):
        fields.problem("latent_attention is missing: convert the checkpoint again.")
        return None
    own = Fields(found)
    layout = own.choice("layout", ("paper", "deepseek"), default="paper")
    result = Converted(
        layout="paper" if layout == "paper" else "deepseek",
        num_pairs=own.integer("rope_pairs", minimum=0),
        rank=own.integer("kv_rank"),
        query_rank=own.integer("q_rank", default=0, minimum=0),
    )
    if original.latent is not None:
        own.problem(f"a {original.family} has no other attention that could be converted.")
    if result.rotary_width > original.head_size:
        own.problem(f"rope_pairs {result.num_pairs} are more than a head has.")
    for problem in own.problems:
        fields.problem(f"latent_attention: {problem}")
    return result
