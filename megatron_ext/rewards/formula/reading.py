r"""An answer's text to a node: lists, relations, sets, quantities with units, words, matrices.

    read(r"x = 3 \text{ or } x = 5")   a list of two relations
    read(r"(-\infty, 2] \cup [3, 4)")  a union
    read(r"5\text{ cm}^2")             a quantity

Every token counts: what is left over makes the text no answer.
"""

from __future__ import annotations

from megatron_ext.rewards.formula.expressions import Expressions
from megatron_ext.rewards.formula.nodes import BrokenFormula, Node, UnknownFormula
from megatron_ext.rewards.formula.spelling import spelled
from megatron_ext.rewards.formula.tokens import Token, tokens
from megatron_ext.rewards.formula.units import canonical_unit

_RELATIONS = {
    "=": "=", "<": "<", ">": ">", "le": "<=", "ge": ">=", "ne": "!=", "in": "in", "approx": "~",
    "equiv": "==",
}  # fmt: skip
_UNIONS = {"cup": "union", "cap": "intersection", "setminus": "difference"}
_CURRENCIES = {"dollar": "dollar", "euro": "euro", "pounds": "pound_sterling"}
_DENIALS = """is are not no never wrong false incorrect than of to more less but if least most under
over about almost except instead"""
_NO_UNITS = frozenset(_DENIALS.split())
"""Words that change what the number before them says."""
_MATRICES = frozenset(("pmatrix", "bmatrix", "matrix", "Bmatrix", "smallmatrix", "array"))


def read(text: str) -> Node:
    """The answer that a text states.

    Raises:
        BrokenFormula: it is no formula: something is missing.
        UnknownFormula: it may be one, of a kind that is not read here.
    """
    found = tokens(spelled(text))
    while found and found[-1].kind == "separator" and found[-1].value in (";", "quad"):
        found.pop()
    if not found:
        raise BrokenFormula("it is empty")
    if all(token.kind == "text" or token.kind == "separator" for token in found):
        return _words(found)
    cursor = Expressions(found, read_list=_list)
    node = _list(cursor)
    if cursor.next.kind != "end":
        unpaired = cursor.next.kind == "sign" and cursor.next.value in ")]}"
        raise (BrokenFormula if unpaired else UnknownFormula)(f"{cursor.next.value!r} is left over")
    return node


def _words(found: list[Token]) -> Node:
    texts = [token.value for token in found]
    if "".join(texts).strip(",; ") == "":
        raise BrokenFormula("it holds separators only")
    return Node("words", value=" ".join(texts))


def _list(cursor: Expressions) -> Node:
    """Items between separators; groups between semicolons are tuples if they have commas."""
    groups: list[list[Node]] = [[_item(cursor)]]
    separators: set[str] = set()
    while cursor.at("separator") or cursor.at("command", "vee"):
        passed = set[str]()
        while cursor.at("separator") or cursor.at("command", "vee"):
            passed.add(cursor.take().value)
        if cursor.next.kind == "text" and passed == {"quad"}:
            raise UnknownFormula("words stand apart")
        separators |= passed
        if ";" in passed:
            groups.append([])
        groups[-1].append(_item(cursor))
    if len(groups) > 1 and "," in separators:
        items = [Node("tuple", tuple(g)) if len(g) > 1 else g[0] for g in groups]
    else:
        items = [item for group in groups for item in group]
    if len(items) == 1:
        return items[0]
    kinds = {"or" if s == "vee" else s for s in separators} - {"quad"}
    return Node("list", tuple(items), frozenset(kinds))


def _item(cursor: Expressions) -> Node:
    """A quantity, or quantities joined by relations."""
    first = _side(cursor)
    sides, operators = [first], []
    while True:
        token = cursor.next
        if token.kind not in ("sign", "command") or token.value not in _RELATIONS:
            break
        operators.append(_RELATIONS[cursor.take().value])
        sides.append(_side(cursor))
    return Node("relation", tuple(sides), tuple(operators)) if operators else first


def _side(cursor: Expressions) -> Node:
    if cursor.at("text"):
        return _phrase(cursor)
    left = _quantity(cursor)
    while cursor.at("command", *_UNIONS):
        kind = _UNIONS[cursor.take().value]
        left = Node(kind, (left, _quantity(cursor)))
    if cursor.at("sign", ":"):
        parts = [left]
        while cursor.skip("sign", ":"):
            parts.append(_quantity(cursor))
        last = parts[-1]
        if last.kind == "quantity":
            ratio = Node("ratio", (*parts[:-1], last.args[0]))
            return Node("quantity", (ratio,), last.value)
        return Node("ratio", tuple(parts))
    return left


def _phrase(cursor: Expressions) -> Node:
    """Words with numbers or letters between them, as one text."""
    parts = []
    while cursor.next.kind in ("text", "number", "letter"):
        parts.append(cursor.take().value)
    return Node("words", value=" ".join(parts))


def _quantity(cursor: Expressions) -> Node:
    if cursor.at("command", *_CURRENCIES):
        currency = _CURRENCIES[cursor.take().value]
        return _with_unit(cursor, Node("quantity", (cursor.sum(),), currency))
    if cursor.at("command") and cursor.next.value.startswith("begin "):
        return _matrix(cursor)
    if cursor.at("sign", "-") and cursor.peek(1).value in _CURRENCIES:
        cursor.take()
        quantity = _quantity(cursor)
        return Node("quantity", (Node("neg", quantity.args),), quantity.value)
    node = cursor.sum()
    if cursor.at("command", *_CURRENCIES):
        node = Node("quantity", (node,), _CURRENCIES[cursor.take().value])
    return _with_unit(cursor, node)


def _with_unit(cursor: Expressions, node: Node) -> Node:
    """The node with the unit that follows; a compound if another quantity follows that."""
    quantities: list[Node] = []
    while True:
        unit = _unit(cursor)
        sign, bare = (node.args[0], True) if node.kind == "neg" else (node, False)
        if sign.kind == "degrees":
            inner = Node("neg", sign.args) if bare else sign.args[0]
            node = Node("quantity", (inner,), f"degree {unit}".strip())
        elif unit and node.kind == "quantity":
            node = Node("quantity", node.args, canonical_unit(f"{node.value} {unit}"))
        elif unit:
            node = Node("quantity", (node,), unit)
        if not unit or not cursor.at("number"):
            break
        quantities.append(node)
        node = cursor.sum()
    return Node("compound", (*quantities, node)) if quantities else node


def _unit(cursor: Expressions) -> str:
    parts: list[str] = []
    while True:
        if cursor.at("text"):
            parts.append(cursor.take().value)
        elif cursor.at("sign", "%") or cursor.at("command", "%"):
            cursor.take()
            parts.append("percent")
        elif parts and cursor.at("sign", "^"):
            cursor.take()
            braced = cursor.skip("sign", "{")
            parts.append(f"^{'-' if cursor.skip('sign', '-') else ''}{cursor.take().value}")
            if braced and not cursor.skip("sign", "}"):
                raise BrokenFormula("} is missing")
        elif cursor.at("sign", "/") and cursor.peek(1).kind == "text":
            cursor.take()
            parts.append("/")
        elif parts and cursor.at("command", "cdot") and cursor.peek(1).kind == "text":
            cursor.take()
        else:
            if _NO_UNITS.intersection(" ".join(parts).lower().split()):
                raise UnknownFormula("the words after a number are no unit")
            return canonical_unit(" ".join(parts)) if parts else ""


def _matrix(cursor: Expressions) -> Node:
    name = cursor.take().value.removeprefix("begin ")
    if name not in _MATRICES:
        raise UnknownFormula(f"{name} is not read here")
    if name == "array":
        while not cursor.skip("sign", "}"):
            cursor.take()
    rows: list[list[Node]] = [[]]
    while True:
        rows[-1].append(_side(cursor))
        if cursor.skip("sign", "&"):
            continue
        if cursor.skip("command", "\\"):
            if cursor.at("command", f"end {name}"):
                break
            rows.append([])
            continue
        break
    if not cursor.skip("command", f"end {name}"):
        raise UnknownFormula(f"{name} holds something that is not read here")
    if len({len(row) for row in rows}) > 1:
        raise UnknownFormula("the rows of the matrix differ in length")
    return Node("matrix", tuple(cell for row in rows for cell in row), len(rows[0]))
