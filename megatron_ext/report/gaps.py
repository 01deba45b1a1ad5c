"""What is missing in a run's record, and why: said once a file when it begins, and at the end."""

from __future__ import annotations

import logging
from pathlib import Path

logger = logging.getLogger(__name__)


class Gaps:
    """Counts what files of the record lack."""

    def __init__(self) -> None:
        self._counts: dict[tuple[Path, str, str], int] = {}
        self._announced: set[Path] = set()

    def announce(self, path: Path, *, reason: str) -> None:
        """Warn, the first time, that a file is not written as it should be."""
        if path not in self._announced:
            self._announced.add(path)
            logger.warning("%s is incomplete, and the run goes on: %s", path, reason)

    def lost(self, path: Path, *, count: int, what: str, reason: str) -> None:
        """A file lacks so many `what` (steps, episodes)."""
        self.announce(path, reason=reason)
        key = (path, what, reason)
        self._counts[key] = self._counts.get(key, 0) + count

    def sentences(self) -> list[str]:
        """What each file lacks; empty for a record that is whole."""
        return [
            f"{path.name} lacks {count} {what}: {reason}"
            for (path, what, reason), count in self._counts.items()
        ]
