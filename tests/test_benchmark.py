"""tools/benchmark.py: modules have their names, figures are shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.benchmark import BENCHMARKS, main, table

ROOT = Path(__file__).resolve().parent.parent


def test_every_benchmark_has_a_name():
    folder = ROOT / "tools" / "benchmarks"
    runnable = [path.stem for path in folder.glob("*.py") if "\ndef run(" in path.read_text()]
    assert sorted(name.replace("-", "_") for name in BENCHMARKS) == sorted(runnable)


def test_an_unknown_name_lists_those_that_exist(capsys):
    with pytest.raises(SystemExit) as raised:
        main(["cpu-mod"])
    assert raised.value.code == 2
    message = capsys.readouterr().err
    assert all(name in message for name in (*BENCHMARKS, "there is no benchmark cpu-mod"))


def test_the_table_shows_ratios_to_the_first():
    text = table({"seconds": {"one": 2.0, "two": 3.0}, "ratio": 1.5, "parts": [1, 2]})
    assert [line.split() for line in text.splitlines()] == [
        ["seconds", "one", "2", "two", "3", "(x", "1.5)"],
        ["ratio", "1.5"],
        ["parts", "[1,", "2]"],
    ]
