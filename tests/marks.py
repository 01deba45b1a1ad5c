"""Which parameters of a test belong to the quick part."""

from __future__ import annotations

from collections.abc import Container, Iterable

import pytest


def slow_except(quick: Container[str], names: Iterable[str]) -> list[object]:
    """Parameters of a test, marked `slow` unless they are in ``quick``."""
    return [pytest.param(n, marks=() if n in quick else pytest.mark.slow, id=n) for n in names]
