"""report.html while the run goes: drawn at the first step, then now and then, and at the end.

Invariant: drawing takes at most about MAX_SHARE of the time, however slow it is: a long one is
repeated less often than the interval says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

from megatron_ext.report.history import History
from megatron_ext.report.output_folder import replacing
from megatron_ext.report.page import Page, render_page
from megatron_ext.report.plots import load_plotting
from megatron_ext.report.run_record import RunRecord
from megatron_ext.report.sink import Number, Outcome

MAX_SHARE = 0.02


class LivePage:
    """Keeps `path` up to date.

    history: what earlier processes of this run logged.
    interval_seconds: least time between two drawings; 0 = draw at the end only.
    """

    def __init__(
        self,
        path: Path,
        *,
        title: str,
        record: RunRecord,
        history: History,
        interval_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.place = str(path)
        self._path = path
        self._title = title
        self._record = record
        self._history = history
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._next_time = clock() if interval_seconds > 0 else float("inf")

    def write(self, step: int, metrics: Mapping[str, Number]) -> None:
        self._history.add(step, metrics)
        start = self._clock()
        if start < self._next_time:
            return
        try:
            load_plotting()
            start = self._clock()
            self._draw(Outcome(status="running"))
        finally:
            end = self._clock()
            self._next_time = end + max(self._interval_seconds, (end - start) / MAX_SHARE)

    def close(self, outcome: Outcome) -> None:
        self._draw(outcome)

    def _draw(self, outcome: Outcome) -> None:
        page = Page(
            title=self._title,
            outcome=outcome,
            history=self._history,
            record=self._record,
            updated=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z"),
        )
        text = render_page(page)
        with replacing(self._path) as file:
            file.write(text)
