"""Every operator's shards cover its tensors exactly once, and scatter undoes fill."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_ext.weights.operators import (
    Block,
    GroupedHeads,
    Operator,
    Replicated,
    Shard,
    SplitColumns,
    SplitRows,
    Stacked,
    fill,
    scatter,
)

WIDTH = 3
counts = st.integers(1, 4)
sizes = st.integers(1, 3)


def random_tensors(operator: Operator) -> dict[str, Tensor]:
    return {name: torch.randn(shape) for name, shape in operator.tensors().items()}


def shards_of(operator: Operator, tensors: dict[str, Tensor], count: int) -> list[Tensor]:
    """What `fill` makes on each of `count` ranks, over memory that held something else."""

    def read(block: Block) -> Tensor:
        return tensors[block.name][block.index]

    shards = []
    for index in range(count):
        shard = Shard(index=index, count=count)
        target = torch.full(operator.local_shape(shard), float("nan"))
        fill(target, operator, shard=shard, read=read)
        shards.append(target)
    return shards


def check_round_trip(operator: Operator, count: int) -> list[Tensor]:
    tensors = random_tensors(operator)
    shards = shards_of(operator, tensors, count)
    back = {name: torch.full_like(tensor, float("nan")) for name, tensor in tensors.items()}
    for index, shard in enumerate(shards):
        scatter(shard, operator, shard=Shard(index=index, count=count), tensors=back)
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)
    return shards


@given(counts, sizes, sizes)
def test_grouped_heads_are_megatrons_interleaving(count: int, groups: int, heads: int):
    operator = GroupedHeads(
        query="q",
        key="k",
        value="v",
        num_groups=groups * count,
        heads_per_group=heads,
        head_size=2,
        width=WIDTH,
    )
    check_round_trip(operator, count)
    tensors = random_tensors(operator)
    q, k, v = (tensors[name].view(groups * count, -1, WIDTH) for name in "qkv")
    whole = torch.cat([q, k, v], dim=1).reshape(-1, WIDTH)
    assert torch.equal(torch.cat(shards_of(operator, tensors, count)), whole)


@given(counts, sizes)
def test_stacked_has_its_part_of_each_tensor_on_every_rank(count: int, rows: int):
    operator = Stacked(names=("gate", "up"), shape=(rows * count, WIDTH))
    check_round_trip(operator, count)
    tensors = random_tensors(operator)
    parts = [tensors[name].chunk(count) for name in ("gate", "up")]
    for index, shard in enumerate(shards_of(operator, tensors, count)):
        assert torch.equal(shard, torch.cat([part[index] for part in parts]))


@given(counts, sizes)
def test_columns_side_by_side_are_the_tensor(count: int, columns: int):
    operator = SplitColumns(name="w", shape=(WIDTH, columns * count))
    tensors = random_tensors(operator)
    assert torch.equal(torch.cat(shards_of(operator, tensors, count), dim=1), tensors["w"])
    check_round_trip(operator, count)


@settings(max_examples=50)
@given(counts, st.integers(1, 9), st.integers(0, 9))
def test_rows_beyond_the_vocabulary_are_zero(count: int, rows: int, padding: int):
    padded = -(-(rows + padding) // count) * count
    operator = SplitRows(name="w", shape=(rows, WIDTH), padded_rows=padded)
    whole = torch.cat(check_round_trip(operator, count))
    assert whole.shape == (padded, WIDTH)
    assert whole[rows:].count_nonzero() == 0


@given(counts)
def test_replicated_is_whole_everywhere(count: int):
    operator = Replicated(name="w", shape=(WIDTH,))
    check_round_trip(operator, count)


def test_biases_have_no_columns():
    check_round_trip(
        GroupedHeads(query="q", key="k", value="v", num_groups=2, heads_per_group=3, head_size=2), 2
    )
    check_round_trip(Stacked(names=("gate", "up"), shape=(4,)), 2)


def test_values_take_the_type_of_the_model():
    target = torch.empty(2, dtype=torch.bfloat16)
    fill(
        target,
        Replicated(name="w", shape=(2,)),
        shard=Shard(),
        read=lambda _: torch.tensor([1.0, 1 + 2**-12]),
    )
    assert target.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "operator",
    [
        SplitRows(name="w", shape=(3, 2)),
        SplitColumns(name="w", shape=(2, 3)),
        Stacked(names=("w", "u"), shape=(3, 2)),
        GroupedHeads(query="q", key="w", value="v", num_groups=3, heads_per_group=1, head_size=2),
    ],
    ids=lambda operator: type(operator).__name__,
)
def test_ranks_that_do_not_divide_are_refused(operator: Operator):
    with pytest.raises(ValueError, match=r"w: 3 .* cannot be divided over 2 tensor-parallel ranks"):
        list(operator.blocks(Shard(index=1, count=2)))
