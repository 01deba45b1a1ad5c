r"""Sets of real numbers: intervals, unions, inequalities, compared cell by cell.

All end points of two answers, in order, cut the line into points and open cells between them; two
sets are equal if they have the same cells.  Cell 2i+1 is end point i; even cells lie between.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cmp_to_key

from megatron_ext.rewards.formula.equality import equal, ordered
from megatron_ext.rewards.formula.nodes import Node, is_expression

_MAX_ENDS = 60
_INFINITY = Node("constant", value="infinity")
_WHOLE_LINE = Node("constant", value="reals")
_NOTHING = Node("constant", value="empty")


class NotOnTheLine(ValueError):
    """The answer is no set of real numbers with known end points."""


def same_reals(a: Node, b: Node) -> bool | None:
    """Whether two answers are the same set of real numbers; None = one is no such set."""
    try:
        line = _Line([*_ends(a), *_ends(b)])
        return all(line.has(a, cell) == line.has(b, cell) for cell in range(line.num_cells))
    except NotOnTheLine:
        return None


def variable(node: Node) -> Node | None:
    """The one unknown that all inequalities of a node are about; None = there is none."""
    found = None
    for part in node.walk():
        if part.kind == "relation":
            unknown = _unknown(part)
            if unknown is None or found not in (None, unknown):
                return None
            found = unknown
    return found


def _unknown(relation: Node) -> Node | None:
    with_letters = [side for side in relation.args if side.symbols()]
    if len(with_letters) != 1:
        return None
    unknown = with_letters[0]
    is_plain = unknown.kind == "symbol" or (
        unknown.kind == "call" and unknown.value.startswith("?")
    )
    return unknown if is_plain else None


def _is_number(node: Node) -> bool:
    return is_expression(node) and not node.symbols()


def _ends(node: Node) -> list[Node]:
    if node.kind in ("interval", "set") or (node.kind == "tuple" and len(node.args) == 2):
        ends = list(node.args)
    elif node.kind in ("union", "intersection", "difference", "list"):
        return [end for part in node.args for end in _ends(part)]
    elif node.kind == "relation":
        unknown = _unknown(node)
        if unknown is None or not set(node.value) <= {"<", ">", "<=", ">=", "=", "!="}:
            raise NotOnTheLine
        ends = [side for side in node.args if side is not unknown]
    elif node in (_WHOLE_LINE, _NOTHING):
        return []
    else:
        raise NotOnTheLine
    if not all(_is_number(end) for end in ends):
        raise NotOnTheLine
    return ends


def _is_infinite(node: Node) -> bool:
    return node == _INFINITY or (node.kind == "neg" and node.args[0] == _INFINITY)


class _Line:
    def __init__(self, ends: Sequence[Node]) -> None:
        if len(ends) > _MAX_ENDS:
            raise NotOnTheLine
        self._ends: list[Node] = []
        for end in ends:
            if not _is_infinite(end) and not any(equal(end, known) for known in self._ends):
                self._ends.append(end)
        self._ends.sort(key=cmp_to_key(_order))
        self.num_cells = 2 * len(self._ends) + 1

    def has(self, node: Node, cell: int) -> bool:
        """Whether a set has a cell."""
        if node.kind == "union" or (node.kind == "list"):
            return any(self.has(part, cell) for part in node.args)
        if node.kind == "intersection":
            return all(self.has(part, cell) for part in node.args)
        if node.kind == "difference":
            return self.has(node.args[0], cell) and not self.has(node.args[1], cell)
        if node.kind == "set":
            return any(cell == self._position(end) for end in node.args)
        if node.kind == "relation":
            return self._satisfies(node, cell)
        if node.kind == "constant":
            return node == _WHOLE_LINE
        low, high = (self._position(end) for end in node.args)
        brackets = node.value or "()"
        if low > high:
            raise NotOnTheLine
        return (low < cell or (low == cell and brackets[0] == "[")) and (
            cell < high or (cell == high and brackets[1] == "]")
        )

    def _satisfies(self, relation: Node, cell: int) -> bool:
        unknown = _unknown(relation)
        places = [cell if side is unknown else self._position(side) for side in relation.args]
        pairs = zip(relation.value, places[:-1], places[1:], strict=True)
        return all(_holds(operator, left, right) for operator, left, right in pairs)

    def _position(self, end: Node) -> int:
        if _is_infinite(end):
            return -1 if end.kind == "neg" else self.num_cells
        return next(2 * i + 1 for i, known in enumerate(self._ends) if equal(end, known))


def _order(a: Node, b: Node) -> int:
    is_less = ordered(a, b)
    if is_less is None:
        raise NotOnTheLine
    return -1 if is_less else 1


def _holds(operator: str, left: int, right: int) -> bool:
    if operator == "=":
        return left == right
    if operator == "!=":
        return left != right
    if "<" in operator:
        return left < right or (left == right and "=" in operator)
    return left > right or (left == right and "=" in operator)
