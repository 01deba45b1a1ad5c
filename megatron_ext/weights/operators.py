"""Two-way operators between the tensors of a checkpoint and one parameter of Megatron's model.

A tensor-parallel shard of a parameter is a stack of rectangles of checkpoint tensors: the operator
lists them (`blocks`).  `fill` plays the list forward, reading one rectangle at a time; `scatter`
plays it in reverse.  So one list per operator is all there is to get right, for any shard count.
Models of 16 bits round all their floating-point values, so what must not be rounded is a parameter
of int32 that has the bits of a float32 tensor.
Invariant the tests check: the shards' blocks cover each tensor exactly once (replicated ones, once
a shard), and scatter after fill restores every tensor bit for bit.

Legend: a shard is (index, count) of the tensor-parallel ranks; 1-D tensors are columns of width 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Which part of a parameter a rank holds."""

    index: int = 0
    count: int = 1


WHOLE = Shard()


@dataclass(frozen=True, kw_only=True)
class Block:
    """A rectangle of one checkpoint tensor: rows, and columns where it has some."""

    name: str
    rows: slice
    columns: slice | None = None

    @property
    def index(self) -> tuple[slice, ...]:
        """The rectangle as a tensor index."""
        return (self.rows,) if self.columns is None else (self.rows, self.columns)


Read = Callable[[Block], Tensor]
"""Gives the values of a rectangle, in any floating-point type."""


@dataclass(frozen=True, kw_only=True)
class Replicated:
    """Every shard holds the whole tensor: norms, routers, biases of row-parallel layers."""

    name: str
    shape: Shape

    def tensors(self) -> dict[str, Shape]:
        """Checkpoint tensors and their shapes."""
        return {self.name: self.shape}

    def local_shape(self, shard: Shard) -> Shape:
        """Shape of one shard of the parameter."""
        return self.shape

    def blocks(self, shard: Shard) -> Iterator[Block]:
        """Rectangles that one shard stacks, top to bottom."""
        yield Block(name=self.name, rows=slice(0, self.shape[0]))


@dataclass(frozen=True, kw_only=True)
class SplitRows:
    """Rows are divided over the shards (column-parallel layers).

    Rows up to ``padded_rows`` exist only in Megatron, are zero, and belong to the last shards.
    """

    name: str
    shape: Shape
    padded_rows: int = 0

    def tensors(self) -> dict[str, Shape]:
        """Checkpoint tensors and their shapes."""
        return {self.name: self.shape}

    def local_shape(self, shard: Shard) -> Shape:
        """Shape of one shard of the parameter."""
        return (_part(max(self.padded_rows, self.shape[0]), shard, self.name), *self.shape[1:])

    def blocks(self, shard: Shard) -> Iterator[Block]:
        """Rectangles that one shard stacks, top to bottom; rows below them are padding."""
        size = self.local_shape(shard)[0]
        start, stop = (min(i * size, self.shape[0]) for i in (shard.index, shard.index + 1))
        if start < stop:
            yield Block(name=self.name, rows=slice(start, stop))


@dataclass(frozen=True, kw_only=True)
class SplitColumns:
    """Columns are divided over the shards (weights of row-parallel layers)."""

    name: str
    shape: Shape

    def tensors(self) -> dict[str, Shape]:
        """Checkpoint tensors and their shapes."""
        return {self.name: self.shape}

    def local_shape(self, shard: Shard) -> Shape:
        """Shape of one shard of the parameter."""
        return (self.shape[0], _part(self.shape[1], shard, self.name))

    def blocks(self, shard: Shard) -> Iterator[Block]:
        """Rectangles that one shard stacks, top to bottom."""
        size = self.local_shape(shard)[1]
        columns = slice(shard.index * size, (shard.index + 1) * size)
        yield Block(name=self.name, rows=slice(0, self.shape[0]), columns=columns)


@dataclass(frozen=True, kw_only=True)
class Stacked:
    """Tensors of one shape on top of each other within each shard: gate above up."""

    names: tuple[str, ...]
    shape: Shape

    def tensors(self) -> dict[str, Shape]:
        """Checkpoint tensors and their shapes."""
        return dict.fromkeys(self.names, self.shape)

    def local_shape(self, shard: Shard) -> Shape:
        """Shape of one shard of the parameter."""
        size = _part(self.shape[0], shard, self.names[0])
        return (len(self.names) * size, *self.shape[1:])

    def blocks(self, shard: Shard) -> Iterator[Block]:
        """Rectangles that one shard stacks, top to bottom."""
        for name in self.names:
            yield from SplitRows(name=name, shape=self.shape).blocks(shard)


@dataclass(frozen=True, kw_only=True)
class GroupedHeads:
    """Query, key and value heads interleaved by KV group: q ... q k v | q ... q k v | ...

    ``width`` is the input size of weights, 0 for biases.
    """

    query: str
    key: str
    value: str
    num_groups: int
    heads_per_group: int
    head_size: int
    width: int = 0

    def _shape(self, num_heads: int) -> Shape:
        return (num_heads * self.head_size, *([self.width] if self.width else []))

    def tensors(self) -> dict[str, Shape]:
        """Checkpoint tensors and their shapes."""
        kv = self._shape(self.num_groups)
        return {
            self.query: self._shape(self.num_groups * self.heads_per_group),
            self.key: kv,
            self.value: kv,
        }

    def local_shape(self, shard: Shard) -> Shape:
        """Shape of one shard of the parameter."""
        return self._shape(_part(self.num_groups, shard, self.key) * (self.heads_per_group + 2))

    def blocks(self, shard: Shard) -> Iterator[Block]:
        """Rectangles that one shard stacks, top to bottom."""
        groups = _part(self.num_groups, shard, self.key)
        for group in range(shard.index * groups, (shard.index + 1) * groups):
            for name, heads in ((self.query, self.heads_per_group), (self.key, 1), (self.value, 1)):
                size = heads * self.head_size
                yield Block(name=name, rows=slice(group * size, (group + 1) * size))


Operator = Replicated | SplitRows | SplitColumns | Stacked | GroupedHeads


def fill(target: Tensor, operator: Operator, *, shard: Shard, read: Read) -> None:
    """Write one shard of a parameter, block by block; rows that no block covers become zero.

    target: of ``operator.local_shape(shard)``; its type may differ from the source's.
    """
    row = 0
    for block in operator.blocks(shard):
        part = read(block)
        if target.dtype == torch.int32:
            part = part.float().contiguous().view(torch.int32)
        target[row : row + len(part)].copy_(part)
        row += len(part)
    target[row:].zero_()


def scatter(
    local: Tensor, operator: Operator, *, shard: Shard, tensors: Mapping[str, Tensor]
) -> None:
    """The inverse of `fill`: write one shard into the checkpoint tensors."""
    row = 0
    if local.dtype == torch.int32:
        local = local.contiguous().view(torch.float32)
    for block in operator.blocks(shard):
        target = tensors[block.name][block.index]
        target.copy_(local[row : row + len(target)])
        row += len(target)


def _part(size: int, shard: Shard, name: str) -> int:
    if size % shard.count:
        raise ValueError(
            f"{name}: {size} rows, columns or groups cannot be divided over {shard.count} "
            "tensor-parallel ranks. Use a tensor-parallel size that divides them."
        )
    return size // shard.count
