"""Folders that cannot be written to are seen at once, and looking leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.options.paths import folder_problems, path_problems

UNWRITABLE = ["/proc/run", "/proc", "/sys/run", "/dev/null", "/dev/null/run"]


@pytest.mark.parametrize("flag", ["--save", "--output-dir"])
@pytest.mark.parametrize("folder", UNWRITABLE)
def test_r9_a_place_that_takes_no_folder_is_refused(flag: str, folder: str):
    (problem,) = path_problems({flag: folder})
    assert problem.startswith(f"{flag} {folder} ")
    assert problem.endswith(".")


def test_r9_a_file_is_no_folder_and_has_none_in_it(tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("x")
    assert "is a file: name a folder" in folder_problems(str(file), flag="--save")[0]
    below = folder_problems(str(file / "deep" / "run"), flag="--save")[0]
    assert f"lies under {file}, which is a file" in below


def test_a_folder_that_can_be_made_passes_and_nothing_is_left(tmp_path: Path):
    assert folder_problems(str(tmp_path / "a" / "b"), flag="--save") == []
    assert folder_problems(str(tmp_path), flag="--save") == []
    assert list(tmp_path.iterdir()) == []


def test_only_the_processes_that_write_look(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "8")
    monkeypatch.setenv("LOCAL_RANK", "0")
    found = path_problems({"--save": "/proc/x", "--output-dir": "/proc/x"})
    assert [text.split()[0] for text in found] == ["--save"]


def test_inputs_of_the_wrong_kind_are_refused(tmp_path: Path):
    file = tmp_path / "a.txt"
    file.write_text("x")
    wrong = {
        "--train-data": str(tmp_path),
        "--valid-data": str(tmp_path),
        "--load": str(file),
        "--hf-model": "/nope",
        "--tokenizer-model": "/nope",
        "--wandb-project": "p",
    }
    found = path_problems(wrong)
    assert {text.split()[0] for text in found} == set(wrong)
    right = {"--train-data": str(file), "--load": "/nope", "--hf-model": str(tmp_path)}
    assert path_problems(right | {"--wandb-project": "p", "--output-dir": str(tmp_path)}) == []
