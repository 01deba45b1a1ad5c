r"""Whether two answers that were read mean the same.

Sets and lists compare without order, tuples, matrices and ratios with it; a list is a tuple if its
order is the tuple's; a set is never a tuple.  A name before a value may be left out (`x = 5`), but
not changed.  The order counts where several names are left out (`x = 1, y = 2`).
A unit may be left out, but not changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_ext.rewards.formula.equality import equal, proportional
from megatron_ext.rewards.formula.line import same_reals, variable
from megatron_ext.rewards.formula.nodes import Node, is_expression
from megatron_ext.rewards.formula.unfolding import (
    CONTRADICTION,
    ORDERED_KINDS,
    Pair,
    Pairs,
    alternatives,
    items,
)

_MAX_ITEMS = 60
_SET_KINDS = ("interval", "union", "intersection", "difference", "relation")


def same(answer: Node, gold: Node) -> bool | None:
    """Whether the answers mean the same; None = that cannot be told here."""
    if answer == gold:
        return True
    given, expected = items(answer), items(gold)
    if len(given) == len(expected) == 1:
        return _same_named(given[0], expected[0])
    return _same_lists(answer, given, gold, expected)


# one value


def _same_named(given: Pair, expected: Pair) -> bool | None:
    (name, value), (right_name, right) = given, expected
    if name is not None and right_name is not None and name != right_name:
        equations = (name, value, right_name, right)
        if not all(map(is_expression, equations)):
            return False
        return proportional(_minus(name, value), _minus(right_name, right), positive=False)
    if right.kind == "relation" or value.kind == "relation":
        return _same_relations(given, expected)
    return _same_values(value, right)


def _same_values(value: Node, right: Node) -> bool | None:
    if value == right and value != CONTRADICTION:
        return True
    kinds = {value.kind, right.kind}
    if "contradiction" in kinds or "words" in kinds:
        return False
    if "compound" in kinds:
        return value.kind == right.kind and _all_same(value.args, right.args)
    if "quantity" in kinds:
        return _same_quantities(value, right)
    if "base" in kinds:
        return value == right
    if "ratio" in kinds:
        return _same_ratios(value, right)
    if kinds == {"set"}:
        return _matching(_members(value), _members(right))
    if kinds <= {"tuple"} or kinds <= {"matrix"}:
        return value.value == right.value and _all_same(value.args, right.args)
    if kinds & {*_SET_KINDS, "set", "tuple", "matrix"}:
        return _same_sets(value, right)
    if is_expression(value) and is_expression(right):
        return equal(value, right)
    return None


def _all_same(values: Sequence[Node], rights: Sequence[Node]) -> bool | None:
    if len(values) != len(rights):
        return False
    return _and(same(a, b) for a, b in zip(values, rights, strict=True))


def _and(verdicts: Iterable[bool | None]) -> bool | None:
    unknown = False
    for verdict in verdicts:
        if verdict is False:
            return False
        unknown = unknown or verdict is None
    return None if unknown else True


def _same_sets(value: Node, right: Node) -> bool | None:
    expressions = [n for n in (value, right) if is_expression(n)]
    kinds = {value.kind, right.kind}
    if kinds == {"set", "tuple"} or kinds <= {*ORDERED_KINDS}:
        return False
    if expressions and expressions[0].kind != "constant":
        other = right if expressions[0] is value else value
        if other.kind == "set" and len(other.args) == 1:
            return same(other.args[0], expressions[0])
        return False
    empty = Node("constant", value="empty")
    if empty in (value, right) and Node("set") in (value, right):
        return True
    verdict = same_reals(value, right)
    if verdict is not None:
        return verdict
    if value.kind == right.kind and value.value == right.value:
        return _all_same(value.args, right.args) or None
    return None


def _members(node: Node) -> list[Node]:
    return [each for member in node.args for each in alternatives(member)]


def _same_quantities(value: Node, right: Node) -> bool | None:
    units = [n.value if n.kind == "quantity" else None for n in (value, right)]
    inner = [n.args[0] if n.kind == "quantity" else n for n in (value, right)]
    if None not in units:
        return units[0] == units[1] and same(*inner)
    verdict = same(*inner)
    if verdict is True or not all(map(is_expression, inner)):
        return verdict
    at = 0 if units[0] is not None else 1
    if units[at] == "percent":
        inner[at] = Node("div", (inner[at], Node("number", value="100")))
    elif units[at] == "degree":
        inner[at] = Node("degrees", (inner[at],))
    else:
        return verdict
    return equal(*inner)


def _same_ratios(value: Node, right: Node) -> bool | None:
    if value.kind == right.kind:
        if _all_same(value.args, right.args):
            return True
        if len(value.args) != len(right.args) or _is_time(value) or _is_time(right):
            return False
        pairs = zip(value.args[1:], right.args[1:], strict=True)
        first, right_first = value.args[0], right.args[0]
        return all(equal(_times(first, b), _times(right_first, a)) for a, b in pairs)
    ratio, other = (value, right) if value.kind == "ratio" else (right, value)
    if len(ratio.args) != 2 or _is_time(ratio) or not is_expression(other):
        return False
    return equal(Node("div", ratio.args), other)


def _is_time(node: Node) -> bool:
    last = node.args[-1]
    return last.kind == "number" and len(last.value) == 2 and last.value.isdigit()


def _times(a: Node, b: Node) -> Node:
    return Node("mul", (a, b))


def _minus(a: Node, b: Node) -> Node:
    return Node("add", (a, Node("neg", (b,))))


# relations


def _same_relations(given: Pair, expected: Pair) -> bool | None:
    (name, value), (right_name, right) = given, expected
    if value.kind != "relation" or right.kind != "relation":
        relation, other = (value, right) if value.kind == "relation" else (right, value)
        other_name = name if other is value else right_name
        if set(relation.value) == {"="}:
            if other_name is None or not (is_expression(other) and is_expression(other_name)):
                return False  # an equation is not a value
            return _same_equations(relation, Node("relation", (other_name, other), ("=",)))
        unknown = variable(relation)
        if other_name is not None and unknown is not None and other_name != unknown:
            return False
        return (
            False if is_expression(other) and other.kind != "constant" else same_reals(value, right)
        )
    unknowns = variable(value), variable(right)
    if None not in unknowns and unknowns[0] == unknowns[1]:
        verdict = same_reals(value, right)
        if verdict is not None:
            return verdict
    if not all(is_expression(side) for side in (*value.args, *right.args)):
        return None
    if set(value.value) == {"="} == set(right.value):
        return _same_equations(value, right)
    return _same_inequalities(value, right)


def _same_equations(value: Node, right: Node) -> bool | None:
    if len(value.args) != 2 or len(right.args) != 2:
        return _all_same(value.args, right.args)
    return proportional(_minus(*value.args), _minus(*right.args), positive=False)


_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "=": "=", "!=": "!=", "==": "=="}


def _same_inequalities(value: Node, right: Node) -> bool | None:
    mirrored = tuple(_MIRRORED.get(operator, operator) for operator in reversed(value.value))
    if value.value == right.value and _all_same(value.args, right.args):
        return True
    if mirrored == right.value and _all_same(value.args[::-1], right.args):
        return True
    if len(value.args) != 2 or len(right.args) != 2 or "==" in (*value.value, *right.value):
        return False
    sides, right_sides = value.args, right.args
    if value.value[0] != right.value[0]:
        if value.value[0] != _MIRRORED[right.value[0]]:
            return False
        sides = sides[::-1]
    is_positive = value.value[0] != "!="
    return proportional(_minus(*sides), _minus(*right_sides), positive=is_positive)


# several values


def _same_lists(answer: Node, given: Pairs, gold: Node, expected: Pairs) -> bool | None:
    if max(len(given), len(expected)) > _MAX_ITEMS:
        return None
    if len(given) == 1 or len(expected) == 1:
        return _list_and_one(answer, given, gold, expected)
    names, right_names = ({name for name, _ in pairs} for pairs in (given, expected))
    if None not in names and None not in right_names:
        return _matching(given, expected)
    values, rights = ([value for _, value in pairs] for pairs in (given, expected))
    if len(names) > 1 or len(right_names) > 1:
        return _all_same(values, rights)
    if _is_union(answer) != _is_union(gold) or (
        _is_union(answer) and variable(answer) != variable(gold)
    ):
        return same_reals(answer, gold) if _is_union(answer) else False
    if _is_union(answer) and same_reals(answer, gold):
        return True
    if len(_distinct(rights)) < len(rights) and len(values) != len(rights):
        return False
    return _matching(values, rights)


def _list_and_one(answer: Node, given: Pairs, gold: Node, expected: Pairs) -> bool | None:
    """A list against what is no list: a set, a tuple, the value of equal items, a union."""
    many, one, several = (
        (given, expected[0], answer) if len(expected) == 1 else (expected, given[0], gold)
    )
    name, value = one
    values = [v for _, v in many]
    names = {n for n, _ in many} - {None}
    if len(names) == 1 and name is not None and name not in names:
        return False
    if value.kind == "set":
        return _matching(values, _members(value)) if len(names) < 2 else False
    if value.kind == "tuple":
        return _all_same(values, value.args)
    if value.kind == "list":
        return _matching(values, value.args)
    if _is_union(several) and value.kind in ("relation", *_SET_KINDS, "constant"):
        unknown, other = variable(several), name or variable(value)
        return False if other not in (None, unknown) else same_reals(several, value)
    if len(names) < 2 and len(_distinct(values)) == 1:
        return same(values[0], value)
    return False


def _is_union(node: Node) -> bool:
    """Whether it is inequalities about one unknown, joined by `or`."""
    is_list = node.kind == "list" and node.value == frozenset({"or"})
    return is_list and all(n.kind == "relation" for n in node.args) and variable(node) is not None


def _distinct(values: Sequence[Node]) -> list[Node]:
    found: list[Node] = []
    for value in values:
        if not any(same(value, known) for known in found):
            found.append(value)
    return found


def _matching(given: Sequence, expected: Sequence) -> bool | None:
    """Whether each of one has its equal among the others."""

    def pair(a, b) -> bool | None:
        return same(a, b) if isinstance(a, Node) else (a[0] == b[0] and same(a[1], b[1]))

    table = [[pair(a, b) for b in expected] for a in given]
    if all(True in row for row in table) and all(
        any(row[column] is True for row in table) for column in range(len(expected))
    ):
        return True
    return None if any(None in row for row in table) else False
