"""A file is complete, or as it was before."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.report.whole_file import check_writable, whole_file


def test_the_file_appears_whole_or_stays_as_it_was(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    for text in ("first", "second"):
        with whole_file(path) as partial:
            partial.write_text(text)
            assert text == "first" or path.read_text() == "first"
        assert path.read_text() == text
    with pytest.raises(KeyError), whole_file(path) as partial:
        partial.write_text("half of the thi")
        raise KeyError
    assert path.read_text() == "second" and list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_is_said_first(tmp_path: Path):
    check_writable(tmp_path / "new", flag="--output")
    with pytest.raises(ValueError, match=r"--output .* is a folder: name a file"):
        check_writable(tmp_path, flag="--output")
    with pytest.raises(ValueError, match=r"there is no folder .*nowhere"):
        check_writable(tmp_path / "nowhere" / "a", flag="--output")
