"""Patches: what is replaced comes back, what does not fit is refused, every row says why."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import random as megatron_random

from megatron_ext.upstream.cpu import CPU_PATCHES
from megatron_ext.upstream.patches import Patch, applied, problem
from tests.ranks import RankPool


class Base:
    """An owner of every kind of attribute."""

    size = 1

    def plain(self, value: int) -> int:
        return value

    @staticmethod
    def static(value: int) -> int:
        return value

    @classmethod
    def of_class(cls, value: int) -> int:
        return value


class Derived(Base):
    """Inherits them all."""


def function(value: int) -> int:
    """A module's attribute."""
    return value


NAMES = ("size", "plain", "static", "of_class")
TARGETS = ["function", *(f"{owner}.{name}" for owner in ("Base", "Derived") for name in NAMES)]


def patch(target: str, replacement: Any = 7, params: tuple[str, ...] | None = None) -> Patch:
    """A row for a name of this module."""
    return Patch(
        target=target if ":" in target else f"{__name__}:{target}",
        replacement=replacement,
        params=params,
        why="to see it come back",
        remove_when="never",
    )


def stored(rows: Iterable[Patch]) -> list[tuple[bool, Any]]:
    """(whether the owner itself has it, the stored object) of every target."""
    found = []
    for row in rows:
        module, _, path = row.target.partition(":")
        owner: Any = sys.modules[module]
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        found.append((name in vars(owner), inspect.getattr_static(owner, name)))
    return found


def is_same(before: list[tuple[bool, Any]], after: list[tuple[bool, Any]]) -> bool:
    """Whether both have the very same objects in the same places."""
    return all(a == b and x is y for (a, x), (b, y) in zip(before, after, strict=True))


@pytest.mark.parametrize("target", TARGETS)
def test_the_target_is_replaced_and_comes_back(target: str):
    rows = [patch(target)]
    before = stored(rows)
    with applied(rows):
        assert stored(rows) == [(True, 7)]
    assert is_same(before, stored(rows))


def test_everything_comes_back_after_an_exception():
    rows = [patch(target) for target in TARGETS]
    before = stored(rows)
    with pytest.raises(KeyError), applied(rows):
        raise KeyError
    assert is_same(before, stored(rows))


def test_what_cannot_be_replaced_leaves_nothing_replaced():
    rows = [patch("function"), patch("builtins:int.real")]  # a type that takes no assignment
    before = stored(rows)
    with pytest.raises(TypeError), applied(rows):
        pass
    assert is_same(before, stored(rows))


def test_blocks_can_be_nested():
    outer, inner = patch("function"), patch("Derived.plain", 8)
    before = stored([outer, inner])
    with applied([outer]):
        with applied([outer, inner]):
            assert (function, Derived.plain) == (7, 8)
        assert (function, Derived.plain) == (7, Base.plain)
    assert is_same(before, stored([outer, inner]))


def test_a_class_keeps_its_kinds_of_methods():
    with applied([patch("Base.static", staticmethod(lambda value: -value))]):
        assert Base().static(3) == Derived.static(3) == -3
    assert isinstance(vars(Base)["static"], staticmethod)


def test_all_problems_are_listed_and_nothing_is_replaced():
    rows = [
        patch("function"),
        patch("absent"),
        patch("Absent.name"),
        patch("no_such_module:name"),
        patch("Base.plain", params=("self", "other")),
        patch("Base.size", params=()),
        patch("function"),
    ]
    before = stored(rows[:1])
    with pytest.raises(RuntimeError) as raised, applied(rows):
        pytest.fail("the block ran")
    lines = str(raised.value).splitlines()
    assert "megatron-core==0.19.2" in lines[0]
    expected = [
        "absent: no such attribute",
        "has no attribute 'Absent'",
        "No module named 'no_such_module'",
        "parameters are ('self', 'value'), the patch was written for ('self', 'other')",
        "is not a callable object",
        "function: 2 rows replace it",
    ]
    assert len(lines) == 1 + len(expected)
    for line, text in zip(lines[1:], expected, strict=True):
        assert text in line
    assert is_same(before, stored(rows[:1]))


@pytest.mark.parametrize("row", CPU_PATCHES, ids=lambda row: row.target)
def test_row_fits_the_installed_megatron(row: Patch):
    assert problem(row) is None
    assert row.why and row.remove_when
    is_function = callable(row.replacement) and not isinstance(row.replacement, type)
    is_of_torch = row.target.startswith("torch:")  # its methods have no signature
    assert (row.params is not None) == (is_function and not is_of_torch)


def imported_rooms_patch_nothing() -> list[str]:
    """Targets that are replaced in a process that has imported all of upstream."""
    assert "megatron_ext.upstream.cpu" in sys.modules
    replaced = {id(row.replacement) for row in CPU_PATCHES if not isinstance(row.replacement, bool)}
    values = stored(CPU_PATCHES)
    rows = zip(CPU_PATCHES, values, strict=True)
    found = [row.target for row, (_, value) in rows if id(value) in replaced]
    if "cuda" in vars(torch.Tensor) or megatron_random.torch is not torch:
        found.append("torch")
    return found


def test_importing_patches_nothing(ranks: RankPool):
    assert ranks(1).run(imported_rooms_patch_nothing) == [[]]
