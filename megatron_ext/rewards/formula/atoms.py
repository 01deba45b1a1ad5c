r"""What expressions are made of: numbers, symbols, brackets, fractions, roots, functions.

`^10`, `_10` and `\sqrt15` take the whole number, `\frac12` its first digits.  `f(2)` with f, g or h
is the value of a function; any other letter multiplies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from megatron_ext.rewards.formula.cursor import Cursor
from megatron_ext.rewards.formula.nodes import BrokenFormula, Node, UnknownFormula
from megatron_ext.rewards.formula.tokens import FUNCTIONS, Token

CONSTANTS = {"pi": "pi", "infty": "infinity", "emptyset": "empty", "mathbbR": "reals"}
_GREEK_NAMES = """alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma
tau phi chi psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega ell"""
GREEK = frozenset(_GREEK_NAMES.split())
_CLOSERS = {"(": (")", "]"), "[": ("]", ")"), "{": ("}",), "\\{": ("\\}",), "langle": ("rangle",)}


class Atoms(Cursor, ABC):
    """Reads one operand; sums, powers and lists are read by the class below it."""

    def __init__(self, tokens: list[Token]) -> None:
        super().__init__(tokens)
        self._bars = 0

    @abstractmethod
    def sum(self) -> Node:
        """A sum."""

    @abstractmethod
    def power(self) -> Node:
        """An operand with what is raised or stands behind it."""

    @abstractmethod
    def exponent(self) -> Node:
        """What stands after ^."""

    @abstractmethod
    def postfixed(self, node: Node) -> Node:
        """A node with what stands behind it."""

    @abstractmethod
    def factors(self, factor: Node) -> Node:
        """A product without signs between its factors, of which the first is read."""

    @abstractmethod
    def read_list(self) -> Node:
        """What stands between brackets."""

    def primary(self) -> Node:
        """One operand."""
        self.deeper()
        node = self._atom()
        self.higher()
        return node

    def _atom(self) -> Node:
        token = self.take()
        if token.kind == "number":
            return Node("number", value=token.value)
        if token.kind == "base":
            return _in_base(token.value)
        if token.kind == "letter":
            return self._symbol(token.value)
        if token.kind == "command":
            return self._of_command(token.value)
        if token.kind == "sign" and token.value in ("(", "[", "{"):
            self.back()
            return self.bracketed()
        if token[:2] == ("sign", "|"):
            self._bars += 1
            inside = self.sum()
            self._bars -= 1
            self.expect("|")
            return Node("call", (inside,), "abs")
        if token.kind == "sign" and token.value in ")]}+*/^=<>":
            raise BrokenFormula(f"{token.value!r} stands where a number or letter is missing")
        raise UnknownFormula(f"{token.value!r} is not read here")

    def _symbol(self, name: str) -> Node:
        if name in ("e", "i") and not self.at("sign", "_"):
            return Node("constant", value=name)
        if self.skip("sign", "_"):
            name = f"{name}_{_text_of(self._argument())}"
        while self.skip("sign", "'"):
            name += "'"
        if name[0] in "fgh" and self.at("sign", "("):
            inside = self.bracketed()
            return Node("call", inside.args if inside.kind == "tuple" else (inside,), f"?{name}")
        return Node("symbol", value=name)

    def _of_command(self, name: str) -> Node:
        if name in CONSTANTS:
            return Node("constant", value=CONSTANTS[name])
        if name in GREEK:
            return self._symbol(name)
        if name == "frac":
            return Node("div", (self._argument(), self._argument()))
        if name == "binom":
            return Node("call", (self._argument(), self._argument()), "binomial")
        if name == "sqrt":
            return self._root()
        if name in ("{", "langle"):
            self.back()
            return self.bracketed()
        if name in ("lfloor", "lceil"):
            inside = self.sum()
            if not self.skip("command", "r" + name[1:]):
                raise BrokenFormula(f"\\{name} is never closed")
            return Node("call", (inside,), "floor" if name == "lfloor" else "ceiling")
        if name in FUNCTIONS:
            return self._function(name)
        raise UnknownFormula(f"\\{name} is not read here")

    def _root(self) -> Node:
        degree = Node("number", value="2")
        if self.at("sign", "["):
            self.take()
            degree = self.sum()
            self.expect("]")
        inside = self.bracketed() if self.at("sign", "(") else self._argument(whole_number=True)
        return Node("root", (inside, degree))

    def _function(self, name: str) -> Node:
        base = power = None
        for _ in range(2):
            if self.skip("sign", "_"):
                base = self._argument(whole_number=True)
            elif self.skip("sign", "^"):
                power = self.exponent()
        if self.at("sign", "(", "{"):
            argument = self.bracketed()
            argument = self.postfixed(argument)
            if self.at("sign", "^") and self.peek(1)[:2] == ("command", "circ"):
                self.take()
                self.take()
                argument = Node("degrees", (argument,))
        else:
            argument = self._function_argument()
        inputs = argument.args if argument.kind in ("tuple", "list") else (argument,)
        if base is not None:
            inputs = (*inputs, base)
        if power is not None and power == Node("neg", (Node("number", value="1"),)):
            if name not in ("sin", "cos", "tan"):
                raise UnknownFormula(f"\\{name}^{{-1}} is not read here")
            return Node("call", inputs, f"arc{name}")
        call = Node("call", inputs, name)
        return call if power is None else Node("pow", (call, power))

    def _function_argument(self) -> Node:
        if self.skip("sign", "-"):
            return Node("neg", (self.power(),))
        factor = self.factors(self.power())
        if self.at("sign", "/") and self.peek(1).kind in ("number", "letter"):
            self.take()
            factor = Node("div", (factor, self.power()))
        return factor

    def _argument(self, *, whole_number: bool = False) -> Node:
        """What a command acts on: braces, or one token; of a number only its first digit."""
        if self.at("sign", "{"):
            return self.bracketed()
        if self.at("number") and not whole_number and len(self.next.value) > 1:
            token = self.next
            if not token.value.isdigit() or len(token.value) > 2:
                raise UnknownFormula("a command without braces stands before a long number")
            self.replace_next(Token("number", token.value[1:]))
            return Node("number", value=token.value[0])
        if self.next.kind in ("number", "letter"):
            token = self.take()
            name = token.value
            if token.kind == "number":
                return Node("number", value=name)
            return Node("constant" if name in ("e", "i") else "symbol", value=name)
        if self.at("command") and not self.at("command", "{", "}", "pm", "mp"):
            return self.primary()
        raise BrokenFormula("a command lacks its argument")

    def bracketed(self) -> Node:
        """What brackets hold, and make of it."""
        self.deeper()
        opening = self.take()
        key = "\\{" if opening[:2] == ("command", "{") else opening.value
        bars, self._bars = self._bars, 0
        is_empty = key == "\\{" and self.at("command", "}")
        inside = Node("list") if is_empty else self.read_list()
        self._bars = bars
        closing = self.take().value
        if ("\\" + closing if key == "\\{" else closing) not in _CLOSERS[key]:
            raise BrokenFormula(f"{opening.value} is not closed")
        self.higher()
        return _enclosed(inside, key, closing)


def _enclosed(inside: Node, opening: str, closing: str) -> Node:
    """A bracket's content as the structure that the bracket makes of it."""
    items = inside.args if inside.kind == "list" else (inside,)
    if opening == "\\{":
        return Node("set", items)
    if opening == "{":
        return inside
    is_round = (opening, closing) in (("(", ")"), ("langle", "rangle"))
    if inside.kind != "list":
        if not is_round and (opening, closing) != ("[", "]"):
            raise BrokenFormula("brackets of two kinds around one number")
        if opening == "langle":
            raise UnknownFormula("a vector of one number")
        return inside
    if is_round or len(items) != 2:
        if not is_round and (opening, closing) != ("[", "]"):
            raise UnknownFormula("an interval has two ends")
        return Node("tuple", items)
    return Node("interval", items, opening + closing)


_BASE_NAMES = "two three four five six seven eight nine ten eleven twelve"
_BASES = {name: number for number, name in enumerate(_BASE_NAMES.split(" "), start=2)}
_BASES["sixteen"] = 16


def _in_base(text: str) -> Node:
    digits, _, name = text.rpartition("_")
    base = _BASES.get(name) if name.isalpha() else int(name)
    if base is None or not 2 <= base <= 36 or any(int(d, 36) >= base for d in digits if d != "."):
        raise UnknownFormula(f"{text} is no number in a base")
    if base == 10:
        return Node("number", value=digits)
    return Node("base", value=(digits.lstrip("0") or "0", base))


def _text_of(node: Node) -> str:
    if node.kind in ("symbol", "number", "constant"):
        return str(node.value)
    return f"{node.kind}({','.join(map(_text_of, node.args))})"
