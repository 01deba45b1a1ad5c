"""When sampling ends: at stop ids, and at stop strings wherever they lie in the tokens' bytes.

Strings are matched as bytes, so neither a stop string nor a character of it has to begin or end
with a token.  Only sampled tokens are looked at, not the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Watches the sampled tokens of one turn."""

    __slots__ = ("_ids", "_keep", "_strings", "_tail", "_token_bytes", "matched")

    def __init__(
        self,
        *,
        stop_ids: frozenset[int],
        stop_strings: Sequence[str],
        token_bytes: Sequence[bytes] | None,
    ) -> None:
        """Match these.

        token_bytes: what each token contributes to the text; only stop strings need it.
        """
        if stop_strings and token_bytes is None:
            raise ValueError(
                f"stop strings {list(stop_strings)} need the bytes of the tokens: build the engine "
                "with token_bytes (rollout/token_bytes.py), or use stop ids."
            )
        self._ids = stop_ids
        self._strings = [(text.encode(), text) for text in stop_strings]
        self._keep = max((len(encoded) for encoded, _ in self._strings), default=1) - 1
        self._token_bytes = token_bytes
        self.reset()

    def reset(self) -> None:
        """A new turn begins."""
        self._tail = b""
        self.matched: int | str | None = None

    def met(self, token: int) -> bool:
        """Whether the turn ends with this token; `matched` then says by what."""
        if token in self._ids:
            self.matched = token
            return True
        if not self._strings:
            return False
        assert self._token_bytes is not None, "checked when built"
        text = self._tail + self._token_bytes[token]
        found = [
            (end + len(encoded), string)
            for encoded, string in self._strings
            if (end := text.find(encoded)) >= 0
        ]
        if found:
            self.matched = min(found)[1]
            return True
        self._tail = text[-self._keep :] if self._keep else b""
        return False
