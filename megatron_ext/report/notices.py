"""Warnings that are said once: not by every rank and not at every step."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)
_said: set[str] = set()


def warn_once(message: str, *, rank: int = 0, key: str | None = None) -> None:
    """Log `message` as a warning, on rank 0 only and only the first time `key` comes up.

    key: what counts as the same warning; None = the message itself.  Give one when the message
    carries a number or an error text that changes.
    """
    identity = message if key is None else key
    if rank != 0 or identity in _said:
        return
    _said.add(identity)
    logger.warning(message)
