"""The progress display: plain lines in a log file, a bar on a terminal."""

from __future__ import annotations

import io

from megatron_ext.report.progress import key_figures, open_progress
from megatron_ext.report.sink import Outcome

FINISHED = Outcome(status="finished")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_come_now_and_then_and_for_the_last_step():
    stream, times = io.StringIO(), iter([0.0, 1.0, 2.0, 6.0, 7.0])
    lines = open_progress(
        10, start_step=0, interval_seconds=5, stream=stream, clock=lambda: next(times)
    )
    for step in range(1, 6):
        lines.write(step, {"loss": -0.5 * step, "grad_norm": 1.25, "tokens_per_second": 12345.6})
    lines.close(FINISHED)

    assert "\r" not in stream.getvalue()
    assert stream.getvalue().splitlines() == [
        "step 1/10  loss -0.5  grad norm 1.25  12,346 tokens/s",
        "step 4/10  loss -2  grad norm 1.25  12,346 tokens/s  0:00:12 left",  # 6 steps at 2 s
        "step 5/10  loss -2.5  grad norm 1.25  12,346 tokens/s  0:00:09 left",  # 5 at 7/4 s
    ]


def test_without_a_known_end_there_is_no_time_left():
    stream = io.StringIO()
    lines = open_progress(None, start_step=0, interval_seconds=1, stream=stream, clock=lambda: 0.0)
    lines.write(3, {})
    lines.close(FINISHED)
    assert stream.getvalue() == "step 3\n"


def test_a_terminal_gets_a_bar_that_starts_where_the_run_resumes():
    stream = Terminal()
    bar = open_progress(10, start_step=4, interval_seconds=5, stream=stream)
    bar.write(5, {"loss": -0.25})
    bar.write(10, {"loss": -0.5})
    bar.close(FINISHED)
    assert " 4/10 " in stream.getvalue()
    assert " 10/10 " in stream.getvalue()
    assert "loss -0.5" in stream.getvalue()


def test_key_figures_show_what_was_measured():
    assert key_figures({"loss": float("nan"), "lr": 1.0}) == "loss nan"
    shown = key_figures({"loss": 0.5, "sampler_gap": 1.2345e-7, "reward_mean": 0.25})
    assert shown == "reward 0.25  loss 0.5  gap 1.2e-07"
