r"""Tokens to expressions: sums, products, powers.

A number directly after something else is no product but an error (`5 6`, `x2`), apart from mixed
numbers (`1\frac{1}{2}`, `1 1/2`).
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_ext.rewards.formula.atoms import CONSTANTS, GREEK, Atoms
from megatron_ext.rewards.formula.nodes import BrokenFormula, Node, UnknownFormula
from megatron_ext.rewards.formula.tokens import FUNCTIONS, Token

_TIMES = ("cdot", "times")
_FACTOR_COMMANDS = frozenset(("frac", "sqrt", "binom", "{", "langle", "lfloor", "lceil"))
_FACTORS = _FACTOR_COMMANDS | FUNCTIONS | set(CONSTANTS) | GREEK


class Expressions(Atoms):
    """Reads expressions; `read_list` reads what may stand in brackets."""

    def __init__(self, tokens: list[Token], *, read_list: Callable[[Expressions], Node]) -> None:
        super().__init__(tokens)
        self._read_list = read_list

    def read_list(self) -> Node:
        """What stands between brackets."""
        return self._read_list(self)

    def sum(self) -> Node:
        """Terms joined by + - \\pm \\mp."""
        left = self._term()
        while self.at("sign", "+", "-") or self.at("command", "pm", "mp"):
            operator = self.take().value
            right = self._term()
            if operator in ("pm", "mp"):
                left = Node("plus_minus", (left, right), operator)
            else:
                left = Node("add", (left, right if operator == "+" else Node("neg", (right,))))
        return left

    def _term(self) -> Node:
        if self.at("sign", "+", "-"):
            is_minus = self.take().value == "-"
            if self.at("sign", "+", "-"):
                raise UnknownFormula("two signs follow each other")
            return Node("neg", (self._term(),)) if is_minus else self._term()
        if self.at("command", "pm", "mp"):
            return Node("plus_minus", (self._after_take(self._term),), "pm")
        return self._product()

    def _after_take(self, read: Callable[[], Node]) -> Node:
        self.take()
        return read()

    def _product(self) -> Node:
        left = self.power()
        while True:
            if self.at("command", *_TIMES) or self.at("sign", "*"):
                self.take()
                left = Node("mul", (left, self._signed()))
            elif self.at("command", "div") or self.at("sign", "/"):
                if self.peek(1).kind == "text":
                    return left
                self.take()
                left = Node("div", (left, self._signed()))
            elif self._begins_factor():
                left = self._juxtaposed(left)
            else:
                return left

    def _signed(self) -> Node:
        if self.skip("sign", "-"):
            return Node("neg", (self.power(),))
        self.skip("sign", "+")
        return self.power()

    def _begins_factor(self) -> bool:
        token = self.next
        if token.kind == "sign":
            return token.value in "([{" or (token.value == "|" and not self._bars)
        if token.kind == "command":
            return token.value in _FACTORS
        return token.kind in ("number", "letter")

    def _juxtaposed(self, left: Node) -> Node:
        if left.kind == "number" and left.value.isdigit():
            if self.at("command", "frac"):
                fraction = self.power()
                if _is_plain_fraction(fraction):
                    return _mixed(left, fraction)
                return Node("mul", (left, fraction))
            if (
                self.at("number")
                and self.peek(1)[:2] == ("sign", "/")
                and self.peek(2).kind == "number"
            ):
                top = self.take().value
                self.take()
                parts = Node("number", value=top), Node("number", value=self.take().value)
                return _mixed(left, Node("div", parts))
        if self.at("number"):
            raise UnknownFormula("a number stands right after something else")
        return Node("mul", (left, self.power()))

    def factors(self, factor: Node) -> Node:
        """A product without signs between its factors: what a function without brackets is of."""
        while self._begins_factor() and not self.at("command", *FUNCTIONS):
            if self.at("sign", "(", "["):
                break
            factor = self._juxtaposed(factor)
        return factor

    def power(self) -> Node:
        """An operand with its exponent and what stands behind it."""
        base = self.postfixed(self.primary())
        if not self.skip("sign", "^"):
            return base
        if self.skip("command", "circ"):
            return self.postfixed(Node("degrees", (base,)))
        exponent = self.exponent()
        if exponent.kind == "degrees" and not exponent.args:
            return self.postfixed(Node("degrees", (base,)))
        if self.at("sign", "^"):
            raise UnknownFormula("powers of powers need brackets")
        return self.postfixed(Node("pow", (base, exponent)))

    def exponent(self) -> Node:
        """What stands after ^; `degrees` of nothing for the sign of degrees."""
        if self.at("sign", "{") and self.peek(1)[:2] == ("command", "circ"):
            self.take()
            self.take()
            self.expect("}")
            return Node("degrees")
        if self.at("sign", "{", "("):
            return self.bracketed()
        if self.skip("sign", "-"):
            return Node("neg", (self.primary(),))
        if self.next.kind in ("number", "letter", "command"):
            return self.primary()
        raise BrokenFormula("a power lacks its exponent")

    def postfixed(self, node: Node) -> Node:
        """The node with the signs behind it: factorials, degrees, primes."""
        while True:
            if self.at("sign", "!") and self.peek(1)[:2] != ("sign", "="):
                self.take()
                node = Node("call", (node,), "factorial")
            elif self.skip("command", "circ"):
                node = Node("degrees", (node,))
            elif self.at("sign", "'") and node.kind == "symbol":
                self.take()
                node = Node("symbol", value=node.value + "'")
            else:
                return node


def _is_plain_fraction(node: Node) -> bool:
    return node.kind == "div" and all(a.kind == "number" and a.value.isdigit() for a in node.args)


def _mixed(whole: Node, fraction: Node) -> Node:
    top, bottom = (int(part.value) for part in fraction.args)
    if not all(part.value.isdigit() for part in fraction.args) or top >= bottom:
        raise UnknownFormula("a mixed number's fraction is not under one")
    return Node("add", (whole, fraction))
