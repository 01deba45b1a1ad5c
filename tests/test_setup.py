"""The interpreter finder of tools/setup_env.sh, against scripts that play good and bad Pythons.

Law: what is chosen has been run and works; what does not work is named with what it printed.
Not covered: the installation itself (it takes minutes; the entry scripts run it).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "tools" / "setup_env.sh"
REAL_PYTHON = shlex.quote(sys._base_executable)  # of .venv's Python, the one that made it

WORKING = f'exec {REAL_PYTHON} "$@"'
PYENV_SHIM = (
    "echo \"pyenv: python3.12: command not found\" >&2; echo 'It exists in: 3.12.1'; exit 127"
)


def reporting(version: tuple[int, int, int]) -> str:
    """Body of a script: the real interpreter, but `-I -c CODE` sees `version` as its own."""
    pretend = f"import sys; sys.version_info = {version}; exec(sys.argv.pop(1))"
    return f'shift 2; exec {REAL_PYTHON} -I -c "{pretend}" "$@"'


def without_module(name: str) -> str:
    """Body of a script: the real interpreter, but importing `name` fails."""
    pretend = f"import sys; sys.modules['{name}'] = None; exec(sys.argv.pop(1))"
    return f'shift 2; exec {REAL_PYTHON} -I -c "{pretend}" "$@"'


@pytest.fixture
def place(tmp_path):
    """Writes an executable script under a folder whose name has a space; returns its path."""

    def write(path: str, body: str) -> Path:
        script = tmp_path / "with space" / path
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        script.chmod(0o755)
        return script

    return write


@pytest.fixture
def find(tmp_path):
    """Runs the finder where only the placed scripts can be found (and `dirname`, which it uses)."""

    def run(**environment: str | Path) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / "with space"
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        tools = tmp_path / "tools"
        tools.mkdir(exist_ok=True)
        (tools / "dirname").symlink_to(str(shutil.which("dirname")))
        return subprocess.run(
            [str(shutil.which("bash")), str(SCRIPT), "--find-python"],
            env={
                "PATH": f"{folder / 'bin'}{os.pathsep}{tools}",
                "HOME": str(folder),
                **{name: str(value) for name, value in environment.items()},
            },
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=30,
        )

    return run


def chosen(result: subprocess.CompletedProcess[str]) -> Path:
    """The path a successful run printed."""
    assert result.returncode == 0, result.stderr
    return Path(result.stdout.removesuffix("\n"))


def test_python3_12_is_preferred_to_python3(place, find):
    place("bin/python3", WORKING)
    expected = place("bin/python3.12", WORKING)
    assert chosen(find()) == expected


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(PYENV_SHIM, id="pyenv-shim"),
        pytest.param(reporting((3, 11, 9)), id="too-old"),
        pytest.param(reporting((3, 14, 0)), id="no-wheels-yet"),
        pytest.param(without_module("ensurepip"), id="no-ensurepip"),
        pytest.param("exit 0", id="prints-nothing"),
    ],
)
def test_what_does_not_work_is_passed_over(place, find, body):
    place("bin/python3.12", body)
    expected = place("bin/python3", WORKING)
    assert chosen(find()) == expected


def test_python3_13_is_accepted(place, find):
    expected = place("bin/python3.13", reporting((3, 13, 1)))
    assert chosen(find()) == expected


def test_pyenv_version_behind_a_failing_shim(place, find):
    place("bin/python3.12", PYENV_SHIM)
    expected = place(".pyenv/versions/3.12.1/bin/python", WORKING)
    assert chosen(find()) == expected


def test_pyenv_root_elsewhere(place, find):
    place(".pyenv/versions/3.12.1/bin/python", WORKING)
    expected = place("root/versions/3.13.0/bin/python", WORKING)
    assert chosen(find(PYENV_ROOT=expected.parents[3])) == expected


def test_interpreter_that_uv_manages(place, find):
    expected = place("uv-python", WORKING)
    place("bin/uv", f'[ "$*" = "python find --system 3.12" ] && echo {shlex.quote(str(expected))}')
    assert chosen(find()) == expected


def test_conda_environments(place, find):
    place("conda/bin/python", reporting((3, 10, 4)))
    expected = place("conda/envs/rl/bin/python", WORKING)
    conda = place("conda/bin/conda", "exit 1")
    assert chosen(find(CONDA_EXE=conda)) == expected


@pytest.mark.parametrize("name", ["python3.12", "elsewhere"])
def test_PYTHON_comes_before_all_others(place, find, name):
    place("bin/python3.12", WORKING)
    explicit = place(f"explicit/{name}", WORKING)
    assert chosen(find(PYTHON=explicit)) == explicit


@pytest.mark.parametrize(
    ("body", "printed"),
    [
        pytest.param(PYENV_SHIM, "pyenv: python3.12: command not found", id="pyenv-shim"),
        pytest.param(reporting((3, 11, 9)), "it is Python 3.11.9", id="too-old"),
    ],
)
def test_PYTHON_that_does_not_work_is_an_error(place, find, body, printed):
    place("bin/python3.12", WORKING)
    explicit = place("explicit/python", body)
    result = find(PYTHON=explicit)
    assert result.returncode == 1
    assert result.stdout == ""
    assert f"PYTHON={explicit} is not a working Python 3.12 or 3.13: it printed" in result.stderr
    assert printed in result.stderr


def test_none_found_says_what_to_install_and_why_each_was_refused(place, find):
    shim = place("bin/python3.12", PYENV_SHIM)
    old = place("bin/python3", reporting((3, 11, 9)))
    bare = place("bin/python3.13", without_module("ensurepip"))
    result = find()
    assert result.returncode == 1
    assert "no working Python 3.12 or 3.13 was found: install one" in result.stderr
    assert f"  {shim}: pyenv: python3.12: command not found\n" in result.stderr
    assert f"  {old}: it is Python 3.11.9\n" in result.stderr
    assert f"  {bare}: ModuleNotFoundError: import of ensurepip halted" in result.stderr


def test_nothing_at_all_is_one_sentence(find):
    result = find()
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "set PYTHON to its path" in result.stderr


def test_an_environment_behind_a_link_is_not_emptied(tmp_path):
    """`.venv` linked to another project's: making ours would clear theirs."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    (theirs / "bin").mkdir(parents=True)
    (theirs / "bin" / "precious").touch()
    (ours / "tools").mkdir(parents=True)
    for name in ("setup_env.sh", "requirements.lock"):
        shutil.copy(SCRIPT.parent / name, ours / "tools" / name)
    (ours / ".venv").symlink_to(theirs)
    result = subprocess.run(
        ["bash", ours / "tools" / "setup_env.sh"], capture_output=True, text=True, timeout=60
    )
    assert result.returncode != 0
    assert "is a symbolic link to" in result.stderr and "Remove the link" in result.stderr
    assert (theirs / "bin" / "precious").exists()
