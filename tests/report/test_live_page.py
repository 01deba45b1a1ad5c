"""When report.html is drawn: at once, now and then, seldom if drawing is slow, and at the end."""

from __future__ import annotations

import pytest

from megatron_ext.report.history import History
from megatron_ext.report.live_page import LivePage
from megatron_ext.report.run_record import describe_run
from megatron_ext.report.sink import Outcome


class Clock:
    """A time that moves by `per_look` seconds whenever one looks, and by hand."""

    def __init__(self, *, per_look: float) -> None:
        self.now = 0.0
        self.per_look = per_look

    def __call__(self) -> float:
        self.now += self.per_look
        return self.now


def drawn_steps(path, *, clock: Clock, interval_seconds: float, times: list[float]) -> list[int]:
    record = describe_run({}, world_size=1, total_steps=None, resume_step=None)
    page = LivePage(
        path,
        title="run",
        record=record,
        history=History(),
        interval_seconds=interval_seconds,
        clock=clock,
    )
    drawn = []
    for step, time in enumerate(times, start=1):
        clock.now = time
        page.write(step, {})
        if path.exists():
            drawn.append(step)
            path.unlink()
    page.close(Outcome(status="finished"))
    assert "Finished at step" in path.read_text()
    return drawn


@pytest.mark.parametrize(
    ("interval_seconds", "per_look", "drawn"),
    [
        (10, 0.0, [1, 3, 5, 6]),
        (0, 0.0, []),  # only at the end
        (10, 1.0, [1, 6]),  # a drawing of 1 s is repeated after 50 s
    ],
)
def test_the_page_is_drawn_in_time(tmp_path, interval_seconds, per_look, drawn):
    got = drawn_steps(
        tmp_path / "report.html",
        clock=Clock(per_look=per_look),
        interval_seconds=interval_seconds,
        times=[1.0, 9.0, 12.0, 15.0, 30.0, 60.0],
    )
    assert got == drawn
