r"""What an answer says, item by item: names before values, plus-minus signs, factors of tuples.

x = 1, 2           (x, 1), (x, 2)
1 \pm \sqrt{2}     1 + \sqrt{2}, 1 - \sqrt{2}   (several \pm: each on its own; with \mp: together)
-(1, 2)            (-1, -2)
4 = 5              a contradiction, which equals nothing
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from megatron_ext.rewards.formula.equality import equal
from megatron_ext.rewards.formula.nodes import Node, is_expression

ORDERED_KINDS = ("tuple", "matrix")
CONTRADICTION = Node("contradiction")
"""An answer that is false in itself."""
_MAX_ALTERNATIVES = 16

Pair = tuple[Node | None, Node]
"""A name, if one is given, and a value."""
Pairs = list[Pair]


def items(node: Node) -> list[Pair]:
    """The (name, value) pairs that a list states, or a set, or one of a single value."""
    parts = node.args if node.kind == "list" else (node,)
    pairs = []
    for part in parts:
        name, value = _named(part)
        pairs.extend((name, each) for each in alternatives(_scaled(value)))
    if len(pairs) > 1 and pairs[0][0] is not None and all(n is None for n, _ in pairs[1:]):
        return [(pairs[0][0], value) for _, value in pairs]  # x = 1, 2, 3
    return pairs


def _named(node: Node) -> Pair:
    if node.kind != "relation":
        return None, node
    if node.value == ("in",):
        return node.args[0], node.args[1]
    if not set(node.value) <= {"=", "~"}:
        return None, node
    first, *others = node.args
    if not _is_name(first):
        others, first = [first, *others], None
    if "~" in node.value:  # what it is about, not what that is roughly
        others = others[: max(1, list(node.value).index("~") + (first is None))]
    is_chain = len(others) > 1
    if is_chain and all(is_expression(side) for side in others):
        if all(equal(side, others[0]) for side in others[1:]):
            return first, others[-1]
        if first is not None or not node.symbols():
            return first, CONTRADICTION
    return (first, others[-1]) if not is_chain else (None, node)


def _is_name(node: Node) -> bool:
    """Whether it is a symbol, or what is written of symbols alone: f(x), AB, |AB|, (x, y), m:n."""
    if node.kind in ("symbol", "words"):
        return True
    if node.kind == "call":
        return node.value.startswith("?") or (node.value == "abs" and _is_name(node.args[0]))
    return node.kind in ("mul", "div", "tuple", "ratio") and all(map(_is_name, node.args))


def alternatives(node: Node) -> list[Node]:
    """What a value with plus-minus signs may be; the node alone if it has none, or too many."""
    signs = [n.value for n in node.walk() if n.kind == "plus_minus"]
    if not signs or node.kind in ("set", "list"):
        return [node]
    if "mp" in signs:
        choices = [(True,), (False,)]
    elif 2 ** len(signs) <= _MAX_ALTERNATIVES:
        choices = list(product((True, False), repeat=len(signs)))
    else:
        return [node]
    return [_chosen(node, iter(c * len(signs) if len(c) == 1 else c)) for c in choices]


def _chosen(node: Node, signs: Iterator[bool]) -> Node:
    if node.kind == "plus_minus":
        is_plus = next(signs) == (node.value == "pm")
        parts = [_chosen(argument, signs) for argument in node.args]
        last = parts[-1] if is_plus else Node("neg", (parts[-1],))
        return last if len(parts) == 1 else Node("add", (parts[0], last))
    return Node(node.kind, tuple(_chosen(a, signs) for a in node.args), node.value)


def _scaled(node: Node) -> Node:
    """A tuple or matrix with its factor, or sign, in its entries."""
    if node.kind in ("mul", "div", "neg"):
        args = [_scaled(argument) for argument in node.args]
        whole = [a for a in args if a.kind in ORDERED_KINDS]
        is_divisor = node.kind == "div" and args[1].kind in ORDERED_KINDS
        if len(whole) == 1 and not is_divisor:
            at = args.index(whole[0])
            entries = (
                Node(node.kind, tuple(e if i == at else a for i, a in enumerate(args)))
                for e in whole[0].args
            )
            return Node(whole[0].kind, tuple(entries), whole[0].value)
    return node
