"""report.html: well-formed, self-contained, and the values in it are the logged ones."""

from __future__ import annotations

import math
from array import array
from html.parser import HTMLParser

import pytest

from megatron_ext.report.history import History, Series
from megatron_ext.report.page import Page, format_value, render_page
from megatron_ext.report.run_record import describe_run
from megatron_ext.report.sink import Outcome

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Reader(HTMLParser):
    """Checks that elements nest, and collects table rows, links and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and self.rows:
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    def row(self, name: str) -> list[str]:
        (row,) = (row for row in self.rows if row[0] == name)
        return row


def page_of(history: History, *, outcome: Outcome | None = None, options=None) -> Page:
    record = describe_run(
        options or {}, world_size=2, total_steps=100, resume_step=None, command=["train", "--x"]
    )
    return Page(
        title="A <run> & more",
        outcome=outcome or Outcome(status="running"),
        history=history,
        record=record,
        updated="now",
    )


def history_of(*steps: dict[str, float]) -> History:
    history = History()
    for step, metrics in enumerate(steps, start=1):
        history.add(step, metrics)
    return history


def test_every_metric_stands_in_the_page_with_its_values():
    history = history_of(
        {"loss": -0.25, "reward/<mean>": 0.5},
        {"loss": math.nan, "reward/<mean>": 1.5, "peak_memory_bytes": 3 * 2**30},
        {"loss": -0.125, "$x^": -2e-7, "peak_memory_bytes": 2**30},
    )

    reader = Reader(render_page(page_of(history)))

    assert reader.row("loss")[1:] == ["-0.25", "-0.125", "-0.25 step 1", "-0.125 step 3"]
    assert reader.row("reward/<mean>")[2] == "1.5"
    assert reader.row("$x^")[2] == "-2e-07"
    assert reader.row("peak_memory_bytes")[1:3] == ["3 GiB", "1 GiB"]
    assert "A <run> & more" in reader.text
    assert "loss: 1 not finite, first at step 2" in reader.text
    assert "Running at step 3 of 100" in reader.text


def test_the_page_is_self_contained():
    text = render_page(page_of(history_of({"loss": 1.0, "lr": 0.1}, {"loss": 2.0, "lr": 0.1})))
    reader = Reader(text)
    assert "script" not in reader.tags
    assert "link" not in reader.tags
    assert "url(http" not in text
    assert "@import" not in text
    files = [link for link in reader.links if not link.startswith("#")]
    assert files == ["metrics.jsonl", "config.json"]


def test_a_page_without_any_step_is_a_page():
    reader = Reader(render_page(page_of(History())))
    assert "No step has been logged yet." in reader.text


def test_a_failed_run_tells_why():
    outcome = Outcome(status="failed", reason="ValueError: <no> data", details="Traceback ...")
    text = render_page(page_of(history_of({"loss": 1.0}), outcome=outcome))
    assert "Failed at step 1 of 100" in Reader(text).text
    assert "ValueError: <no> data" in Reader(text).text
    assert 'http-equiv="refresh"' not in text  # nothing more will come


def test_options_and_command_are_shown():
    page = page_of(history_of({"loss": 1.0}), options={"lr": 0.1, "name": "<a>", "off": None})
    reader = Reader(render_page(page))
    assert [reader.row(name)[1] for name in ("lr", "name", "off")] == ["0.1", "<a>", "null"]
    assert "train --x" in reader.text


def test_a_hundred_thousand_steps_stay_a_small_page():
    values = [-math.log1p(step) + 10 * (step == 77_777) for step in range(100_000)]
    history = History()
    history.series["loss"] = Series(steps=array("q", range(100_000)), values=array("d", values))
    history.first_step, history.last_step = 0, 99_999
    text = render_page(page_of(history))
    assert len(text) < 60_000
    assert Reader(text).row("loss")[2] == format_value("loss", -math.log1p(99_999))


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("loss", -0.0123456789, "-0.0123457"),
        ("loss", math.nan, "nan"),
        ("loss", -math.inf, "-inf"),
        ("tokens", 1234567.0, "1,234,567"),
        ("lr", 3e-5, "3e-05"),
        ("loss", 1e300, "1e+300"),
        ("free_bytes", 1536.0, "1.5 KiB"),
        ("free_bytes", 5.0 * 2**40, "5 TiB"),
    ],
)
def test_values_are_written_as_they_are(name, value, text):
    assert format_value(name, value) == text
