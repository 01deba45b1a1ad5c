"""The families: for each, one flat table of where Megatron's parameters come from.

Adding a family is a table here, a reader of its config.json (`config_json`) and its tiny model in
the tests.  Not covered: multi-token prediction, vision towers, sliding windows, quantised weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_ext.weights import config_json
from megatron_ext.weights.architecture import Architecture
from megatron_ext.weights.config_fields import check_others
from megatron_ext.weights.converted_json import BASE, CONVERTED, read_converted
from megatron_ext.weights.fields import Fields
from megatron_ext.weights.layers import (
    ATTENTION,
    CHOICE_BIAS,
    CONVERTED_ATTENTION,
    DENSE_MLP,
    EMBEDDING,
    EXPERTS,
    LATENT_ATTENTION,
    MIXTRAL_EXPERTS,
    MLP_BIAS,
    NORMS,
    OUTPUT,
    QK_NORMS,
    SHARED_EXPERTS,
)
from megatron_ext.weights.table import Parameter, Row, parameters_of


@dataclass(frozen=True, kw_only=True)
class Family:
    """A table, and the reader of the family's config.json."""

    read: Callable[[Fields], Architecture]
    rows: tuple[Row, ...]


FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        read=config_json.llama,
        rows=(*EMBEDDING, *NORMS, *ATTENTION, *DENSE_MLP, *MLP_BIAS, *OUTPUT),
    ),
    "mistral": Family(
        read=config_json.mistral,
        rows=(*EMBEDDING, *NORMS, *ATTENTION, *DENSE_MLP, *OUTPUT),
    ),
    "qwen2": Family(
        read=config_json.qwen2,
        rows=(*EMBEDDING, *NORMS, *ATTENTION, *DENSE_MLP, *OUTPUT),
    ),
    "qwen3": Family(
        read=config_json.qwen3,
        rows=(*EMBEDDING, *NORMS, *ATTENTION, *QK_NORMS, *DENSE_MLP, *OUTPUT),
    ),
    "qwen3_moe": Family(
        read=config_json.qwen3_moe,
        rows=(*EMBEDDING, *NORMS, *ATTENTION, *QK_NORMS, *DENSE_MLP, *EXPERTS, *OUTPUT),
    ),
    "mixtral": Family(
        read=config_json.mixtral,
        rows=(*EMBEDDING, *NORMS, *ATTENTION, *MIXTRAL_EXPERTS, *OUTPUT),
    ),
    "deepseek_v2": Family(
        read=config_json.deepseek_v2,
        rows=(
            *EMBEDDING,
            *NORMS,
            *LATENT_ATTENTION,
            *DENSE_MLP,
            *EXPERTS,
            *SHARED_EXPERTS,
            *OUTPUT,
        ),
    ),
    "deepseek_v3": Family(
        read=config_json.deepseek_v3,
        rows=(
            *EMBEDDING,
            *NORMS,
            *LATENT_ATTENTION,
            *DENSE_MLP,
            *EXPERTS,
            *CHOICE_BIAS,
            *SHARED_EXPERTS,
            *OUTPUT,
        ),
    ),
}
"""The families by Hugging Face's ``model_type``."""


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """The architecture that a config.json describes; ValueError as of `read_config`."""
    return read_config(config)[0]


def read_config(config: Mapping[str, Any]) -> tuple[Architecture, list[str]]:
    """The architecture that a config.json describes, and the names of fields that are not used.

    Raises:
        ValueError: its family has no table, or fields are missing, wrong or contradictory; all of
            them are listed.
    """
    model_type = config.get("model_type")
    is_converted = model_type == CONVERTED
    if is_converted:
        model_type = config.get(BASE)
        config = {**config, "model_type": model_type}
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(
            f"config.json: model_type {model_type!r} is not supported. Use a checkpoint of one of "
            f"the families {', '.join(FAMILIES)}."
        )
    fields = Fields(config)
    architecture = FAMILIES[model_type].read(fields)
    if is_converted:
        architecture = replace(architecture, converted=read_converted(fields, architecture))
    unused = check_others(fields, is_latent=architecture.latent is not None)
    if fields.problems:
        raise ValueError("\n  ".join([f"config.json ({model_type}):", *fields.problems]))
    return architecture, unused


def parameters(architecture: Architecture, *, padded_vocab_size: int = 0) -> Iterator[Parameter]:
    """Every parameter of the model and how it is made, in a fixed order.

    padded_vocab_size: rows of Megatron's embedding and output layer; 0 = no padding.
    """
    rows = FAMILIES[architecture.family].rows
    if architecture.converted is not None:
        original = {*ATTENTION, *QK_NORMS}
        rows = (*(row for row in rows if row not in original), *CONVERTED_ATTENTION)
    return parameters_of(rows, architecture, padded_vocab_size=padded_vocab_size)
