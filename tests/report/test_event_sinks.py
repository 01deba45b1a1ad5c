"""TensorBoard events hold every metric of every step, also of a run that was resumed."""

from __future__ import annotations

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_ext.report.event_sinks import TensorBoardEvents
from megatron_ext.report.sink import Outcome


def value(name: str, step: int) -> float:
    return -0.1 * step if name == "loss" else 1.0 / step


def test_events_of_a_resumed_run_are_those_of_an_uninterrupted_one(tmp_path):
    for resume_step, steps in ((None, range(1, 5)), (2, range(3, 7))):
        events = TensorBoardEvents(tmp_path, resume_step=resume_step)
        for step in steps:
            events.write(step, {name: value(name, step) for name in ("loss", "reward/mean")})
        events.close(Outcome(status="finished"))

    reader = EventAccumulator(str(tmp_path)).Reload()
    for name in ("loss", "reward/mean"):
        got = {event.step: event.value for event in reader.Scalars(name)}
        want = {step: value(name, step) for step in range(1, 7)}
        assert got == pytest.approx(want, rel=1e-6)  # events hold float32
