"""What an answer was read as: a tree of nodes, and the two ways in which reading fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


class BrokenFormula(ValueError):
    """The text is no formula: a brace, an argument or an operand is missing."""


class UnknownFormula(ValueError):
    """The text may be a formula, but not one of the kinds that are read here."""


@dataclass(frozen=True, slots=True)
class Node:
    """One part of an answer.

    Numbers: `number` (value: its digits), `constant` (pi, e, i, infinity, reals, empty), `symbol`.
    Operations: `neg`, `add`, `mul`, `div`, `pow`, `root` (radicand, degree), `call` (value: name),
    `plus_minus` (value: "\\pm" or "\\mp"), `degrees`.
    Structures: `list`, `set`, `tuple`, `interval` (value: its brackets), `matrix` (value: columns),
    `union`, `intersection`, `difference`, `relation` (value: operators), `ratio`, `base` (value:
    digits and base), `quantity` (value: unit), `compound` (quantities in a row), `words`.
    """

    kind: str
    args: tuple[Node, ...] = ()
    value: Any = None

    def walk(self) -> Iterator[Node]:
        """This node and all below it."""
        waiting: list[Node] = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.args)

    def symbols(self) -> frozenset[str]:
        """Names of the symbols and unknown functions in it."""
        return frozenset(n.value for n in self.walk() if n.kind == "symbol")

    def has(self, *kinds: str) -> bool:
        """Whether a node of one of these kinds is in it."""
        return any(n.kind in kinds for n in self.walk())


NUMERIC_KINDS = frozenset(
    ("number", "constant", "symbol", "neg", "add", "mul", "div", "pow", "root", "call", "degrees")
)
"""Kinds that have a value."""


def is_expression(node: Node) -> bool:
    """Whether it has a value once its symbols have."""
    return all(n.kind in NUMERIC_KINDS for n in node.walk())
