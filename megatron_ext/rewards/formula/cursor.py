"""The tokens of an answer, and how far they are read."""

from __future__ import annotations

from megatron_ext.rewards.formula.nodes import BrokenFormula, UnknownFormula
from megatron_ext.rewards.formula.tokens import Token

MAX_DEPTH = 60
"""Of brackets within brackets; deeper answers are not read."""
END = Token("end", "")


class Cursor:
    """A place in a list of tokens."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0

    @property
    def next(self) -> Token:
        """The token that comes; `END` after the last."""
        return self._tokens[self._at] if self._at < len(self._tokens) else END

    def peek(self, ahead: int) -> Token:
        """The token `ahead` places after the next."""
        at = self._at + ahead
        return self._tokens[at] if at < len(self._tokens) else END

    def take(self) -> Token:
        """The next token, which is passed."""
        token = self.next
        if token is END:
            raise BrokenFormula("it ends where something is missing")
        self._at += 1
        return token

    def at(self, kind: str, *values: str) -> bool:
        """Whether the next token is of this kind and has one of these values (none: any)."""
        return self.next.kind == kind and (not values or self.next.value in values)

    def skip(self, kind: str, *values: str) -> bool:
        """Pass the next token if it is one of these."""
        found = self.at(kind, *values)
        self._at += found
        return found

    def expect(self, sign: str) -> None:
        """Pass this sign, which must come."""
        if not self.skip("sign", sign):
            raise BrokenFormula(f"{sign} is missing")

    def back(self) -> None:
        """Return to the token that was taken last."""
        self._at -= 1

    def replace_next(self, token: Token) -> None:
        """Put another token in the place of the next."""
        self._tokens[self._at] = token

    def deeper(self) -> None:
        """One level down; every call has its `higher`."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise UnknownFormula("it is nested too deeply")

    def higher(self) -> None:
        """One level up."""
        self._depth -= 1
