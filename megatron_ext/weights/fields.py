"""Typed reading of a JSON object that collects every problem instead of stopping at the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

REQUIRED: Any = object()
"""A field without a default."""


class Fields:
    """The fields of a config.json.  null counts as absent; a wrong field reads as a stand-in.

    Readers go on after a problem, so that `problems` holds all of them at the end.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.problems: list[str] = []
        self.read: set[str] = set()
        """Names that a reader has asked for."""

    def problem(self, text: str) -> None:
        """Note a problem, once."""
        if text not in self.problems:
            self.problems.append(text)

    def get(self, name: str) -> Any:
        """A field as it is; None if it is not there."""
        self.read.add(name)
        return self.config.get(name)

    def _value(self, names: Sequence[str], default: Any) -> tuple[str, Any]:
        self.read.update(names)
        for name in names:
            if self.config.get(name) is not None:
                return name, self.config[name]
        if default is REQUIRED:
            self.problem(f"{names[0]} is missing.")
            return names[0], None
        return names[0], default

    def integer(
        self, *names: str, default: Any = REQUIRED, minimum: int = 1, maximum: int = 2**32
    ) -> int:
        """An integer under the first of the names that is present."""
        name, value = self._value(names, default)
        if isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum:
            return value
        if value is not None:
            self.problem(f"{name} is {value!r}, not an integer from {minimum} to {maximum}.")
        return max(minimum, 1)

    def optional_integer(self, name: str, *, default: int) -> int:
        """An integer of at least 0; null means 0, absence the default."""
        self.read.add(name)
        if name in self.config and self.config[name] is None:
            return 0
        return self.integer(name, default=default, minimum=0)

    def share(self, name: str, *, default: float) -> float:
        """A number from 0 to 1, 1 not among them."""
        value = self.number(name, default=default, minimum=0.0)
        if value >= 1.0:
            self.problem(f"{name} is {value:g}, not a number from 0 to 1.")
            return default
        return value

    def number(self, name: str, *, default: Any = REQUIRED, minimum: float = 1e-30) -> float:
        """A finite number of at least the minimum."""
        name, value = self._value((name,), default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and minimum <= value < 1e30:
            return float(value)
        if value is not None:
            self.problem(f"{name} is {value!r}, not a number of at least {minimum:g}.")
        return max(minimum, 1.0)

    def flag(self, name: str, *, default: bool) -> bool:
        """true or false."""
        _, value = self._value((name,), default)
        if not isinstance(value, bool):
            self.problem(f"{name} is {value!r}, neither true nor false.")
        return value is True

    def text(self, name: str, *, default: Any = REQUIRED) -> str:
        """A string."""
        _, value = self._value((name,), default)
        if value is not None and not isinstance(value, str):
            self.problem(f"{name} is {value!r}, not a string.")
        return str(value)

    def choice(self, name: str, choices: Sequence[str], *, default: str) -> str:
        """One of a few strings."""
        _, value = self._value((name,), default)
        if value not in choices:
            self.problem(f"{name} {value!r} is not supported; it must be {' or '.join(choices)}.")
            return default
        return str(value)

    def integers(self, name: str, *, default: Sequence[int]) -> tuple[int, ...]:
        """A list of integers."""
        _, value = self._value((name,), list(default))
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            self.problem(f"{name} is {value!r}, not a list of integers.")
            return ()
        return tuple(value)

    def texts(self, name: str, *, default: Sequence[str]) -> tuple[str, ...]:
        """A list of strings."""
        _, value = self._value((name,), list(default))
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.problem(f"{name} is {value!r}, not a list of strings.")
            return ()
        return tuple(value)

    def refuse_quantised(self) -> None:
        """Quantised weights need their own arithmetic; the mapping moves plain numbers."""
        quantisation = self.get("quantization_config")
        if quantisation:
            method = (
                quantisation.get("quant_method", "?")
                if isinstance(quantisation, Mapping)
                else quantisation
            )
            self.problem(
                f"quantization_config: the weights are quantised ({method}); use the bf16 or fp32 "
                "checkpoint, or dequantise it first and remove the field."
            )
