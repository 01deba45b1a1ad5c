"""Rows of a family's table, and the parameters they stand for in a model of given size.

A row names one of Megatron's parameters, the operator that makes it from checkpoint tensors, and in
which layers and under which property of the architecture it exists.  ``{layer}`` and ``{expert}``
count from 0 over the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_ext.weights.architecture import Architecture
from megatron_ext.weights.operators import (
    GroupedHeads,
    Operator,
    Replicated,
    SplitColumns,
    SplitRows,
    Stacked,
)

LAYER = "decoder.layers.{layer}."
"""Megatron's prefix of a layer's parameters."""
EXPERT = "mlp.experts.{expert}."
"""Our prefix of an expert's parameters; Megatron's depends on its implementation."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a row is applied: the model, and the layer and expert that fill the names in."""

    architecture: Architecture
    padded_vocab_size: int
    layer: int = 0
    expert: int = 0

    def name(self, pattern: str) -> str:
        """The pattern with layer and expert filled in."""
        return pattern.replace("{layer}", str(self.layer)).replace("{expert}", str(self.expert))


Make = Callable[[Place], Operator]


def replicated(name: str, *sizes: str) -> Make:
    """Whole on every rank.  sizes: names that `Architecture.shape` knows."""
    return lambda p: Replicated(name=p.name(name), shape=p.architecture.shape(*sizes))


def split_rows(name: str, *sizes: str) -> Make:
    """Rows over the ranks."""
    return lambda p: SplitRows(name=p.name(name), shape=p.architecture.shape(*sizes))


def vocabulary(name: str) -> Make:
    """Rows are tokens, padded to Megatron's vocabulary and divided over the ranks."""
    return lambda p: SplitRows(
        name=p.name(name),
        shape=p.architecture.shape("vocab_size", "hidden_size"),
        padded_rows=p.padded_vocab_size,
    )


def split_columns(name: str, *sizes: str) -> Make:
    """Columns over the ranks."""
    return lambda p: SplitColumns(name=p.name(name), shape=p.architecture.shape(*sizes))


def gate_up(gate: str, up: str, *sizes: str) -> Make:
    """Gate above up on every rank, rows of both over the ranks."""
    return lambda p: Stacked(names=(p.name(gate), p.name(up)), shape=p.architecture.shape(*sizes))


def grouped_heads(pattern: str, *, is_bias: bool = False) -> Make:
    """Query, key and value interleaved by KV group; ``{qkv}`` becomes q, k and v."""

    def make(place: Place) -> Operator:
        query, key, value = (place.name(pattern.replace("{qkv}", letter)) for letter in "qkv")
        architecture = place.architecture
        return GroupedHeads(
            query=query,
            key=key,
            value=value,
            num_groups=architecture.num_groups,
            heads_per_group=architecture.num_heads // architecture.num_groups,
            head_size=architecture.head_size,
            width=0 if is_bias else architecture.hidden_size,
        )

    return make


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a family's table."""

    parameter: str
    """Megatron's name, `LAYER` and `EXPERT` in front where it belongs to one."""
    make: Make
    only: str = ""
    """A property of the architecture without which the row does not exist; "" = always."""
    layers: Literal["all", "dense", "sparse"] = "all"
    is_copy: bool = False
    """Whether another row holds the same tensor: loaded, never exported."""
    is_float32: bool = False
    """Whether it stays in float32 in models and files of any type."""
    is_bits: bool = False
    """Whether the parameter is int32 with the bits of the tensor's float32."""

    def exists_in(self, architecture: Architecture, *, layer: int | None) -> bool:
        """Whether a model has this row (in a layer)."""
        if self.only and not getattr(architecture, self.only):
            return False
        if layer is None or self.layers == "all":
            return True
        return architecture.sparse_layers[layer] == (self.layers == "sparse")


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One of Megatron's parameters and the operator that makes it."""

    name: str
    operator: Operator
    is_copy: bool = False
    is_float32: bool = False
    is_bits: bool = False

    @property
    def is_expert(self) -> bool:
        """Whether it is split over the ranks of the expert groups, not the dense ones."""
        return ".mlp.experts." in self.name


def parameters_of(
    rows: Sequence[Row], architecture: Architecture, *, padded_vocab_size: int = 0
) -> Iterator[Parameter]:
    """Every parameter of the model: those before the layers, layer by layer, those behind.

    padded_vocab_size: rows of Megatron's embedding; 0 = no padding.
    """
    per_layer = [row for row in rows if row.parameter.startswith(LAYER)]
    yield from _applied(rows[:1], architecture, padded_vocab_size, layer=None)
    for layer in range(architecture.num_layers):
        yield from _applied(per_layer, architecture, padded_vocab_size, layer=layer)
    rest = [row for row in rows[1:] if row not in per_layer]
    yield from _applied(rest, architecture, padded_vocab_size, layer=None)


def _applied(
    rows: Sequence[Row], architecture: Architecture, padded: int, *, layer: int | None
) -> Iterator[Parameter]:
    for row in rows:
        if not row.exists_in(architecture, layer=layer):
            continue
        experts = architecture.experts if EXPERT in row.parameter else None
        for expert in range(experts.num_experts if experts else 1):
            place = Place(
                architecture=architecture,
                padded_vocab_size=padded,
                layer=layer or 0,
                expert=expert,
            )
            yield Parameter(
                name=place.name(row.parameter),
                operator=row.make(place),
                is_copy=row.is_copy,
                is_float32=row.is_float32,
                is_bits=row.is_bits,
            )
