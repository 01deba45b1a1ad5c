"""Files are replaced whole, and a new run does not overwrite an earlier one."""

from __future__ import annotations

import threading

import pytest

from megatron_ext.report.output_folder import open_output_folder, replacing


def test_readers_see_whole_files_while_writers_replace_them(tmp_path):
    path = tmp_path / "report.html"
    versions = [letter * 300_000 for letter in "abcd"]
    path.write_text(versions[0])

    def replace_often(text: str) -> None:
        for _ in range(15):
            with replacing(path) as file:
                for start in range(0, len(text), 50_000):
                    file.write(text[start : start + 50_000])

    writers = [threading.Thread(target=replace_often, args=(text,)) for text in versions]
    for writer in writers:
        writer.start()
    seen = []
    while any(writer.is_alive() for writer in writers):
        seen.append(path.read_text())
    for writer in writers:
        writer.join()

    assert seen
    assert set(seen) <= set(versions)
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_while_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as file:
        file.write("half of the n")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_run_moves_an_earlier_one_aside(tmp_path):
    for number in (1, 2):
        (tmp_path / "metrics.jsonl").write_text(f"run {number}")
        (tmp_path / "tensorboard").mkdir()
        (tmp_path / "checkpoints").mkdir(exist_ok=True)
        open_output_folder(str(tmp_path), is_new_run=True)
        assert (tmp_path / f"previous-{number}" / "metrics.jsonl").read_text() == f"run {number}"
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["checkpoints", "previous-1", "previous-2"]


def test_a_resumed_run_finds_its_files(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("run")
    (tmp_path / ".metrics.jsonl.7-1a.tmp").touch()  # a process was killed in a replacement
    open_output_folder(str(tmp_path), is_new_run=False)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert (tmp_path / "metrics.jsonl").read_text() == "run"


def test_a_file_in_place_of_the_folder_is_an_error_that_names_the_flag(tmp_path):
    path = tmp_path / "taken"
    path.touch()
    with pytest.raises(OSError, match=r"--output-dir .*taken .*Choose a folder"):
        open_output_folder(str(path), is_new_run=True)
