"""config.json: options of a run, versions it ran with, its commit, command line and outcome.

Invariant: strict JSON whatever the options hold (dtypes, enums, functions become their text).
Values of options that are named like a secret (`..._api_key`, `..._password`) are left out, on the
command line too, because the file and the report are made to be shown around.
"""

from __future__ import annotations

import json
import math
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import megatron_ext
from megatron_ext.report.output_folder import replacing
from megatron_ext.report.sink import Number, Outcome

PACKAGES = ("torch", "megatron-core", "transformers")
_SECRET = re.compile(r"(api[_-]?key|password|secret|(access|auth|hf)[_-]token)$", re.IGNORECASE)
_HIDDEN = "(hidden)"


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What was run; the fields are the keys of config.json."""

    command: str
    options: dict[str, object]
    """Option name -> JSON value, in alphabetical order."""
    versions: dict[str, str | None]
    """Package -> version; None = not installed."""
    git_commit: str | None
    """Commit of megatron_ext's checkout, "-dirty" if tracked files differ; None = no checkout."""
    world_size: int
    total_steps: int | None
    resume_step: int | None
    started: str
    """ISO 8601, UTC."""
    status: str = "running"
    """running, finished, stopped or failed; a run that was killed is still "running"."""
    reason: str = ""
    """Why it was stopped or failed."""
    gaps: tuple[str, ...] = ()
    """What the record of the run lacks, a sentence each."""
    ended: str | None = None
    """ISO 8601, UTC; None = it runs, or was killed."""


def describe_run(
    options: Mapping[str, object],
    *,
    world_size: int,
    total_steps: int | None,
    resume_step: int | None,
    command: Sequence[str] | None = None,
) -> RunRecord:
    """The record of this process.  command: None = that of this process."""
    return RunRecord(
        command=shlex.join(_without_secrets(sys.orig_argv if command is None else command)),
        options={
            name: _HIDDEN if _SECRET.search(name) and options[name] else json_value(options[name])
            for name in sorted(options)
        },
        versions=_versions(),
        git_commit=_git_commit(Path(megatron_ext.__file__).parent),
        world_size=world_size,
        total_steps=total_steps,
        resume_step=resume_step,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def write_run_record(path: Path, record: RunRecord) -> None:
    """Replace config.json as a whole."""
    with replacing(path) as file:
        json.dump(vars(record), file, indent=2, allow_nan=False)
        file.write("\n")


class RunRecordFile:
    """config.json as a sink: it gets the outcome of the run."""

    def __init__(self, path: Path, record: RunRecord) -> None:
        """Write the record of a run that begins."""
        self.place = str(path)
        self._path, self._record = path, record
        write_run_record(path, record)

    def write(self, step: int, metrics: Mapping[str, Number]) -> None:
        """Metrics are not kept here."""

    def close(self, outcome: Outcome) -> None:
        """Write how the run ended."""
        record = replace(
            self._record,
            status=outcome.status,
            reason=outcome.reason,
            gaps=tuple(outcome.gaps),
            ended=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        write_run_record(self._path, record)


def json_value(value: object) -> object:
    """The value as strict JSON has it; what JSON lacks becomes its text."""
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(str(item) for item in value)
    if callable(value):
        return getattr(value, "__qualname__", str(value))
    return str(value)


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "megatron_ext": megatron_ext.__version__,
    }
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return versions


def _git_commit(folder: Path) -> str | None:
    try:
        commit = _git("rev-parse", "HEAD", folder=folder)
        changes = _git("status", "--porcelain", "--untracked-files=no", folder=folder)
    except (OSError, subprocess.SubprocessError):  # no git, no checkout, or a very slow disk
        return None
    return commit + "-dirty" if changes else commit


def _git(*arguments: str, folder: Path) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def _without_secrets(command: Sequence[str]) -> list[str]:
    shown = []
    hide_next = False
    for word in command:
        flag, equals, _ = word.partition("=")
        is_secret = flag.startswith("--") and _SECRET.search(flag) is not None
        if hide_next and not word.startswith("--"):
            shown.append(_HIDDEN)
        else:
            shown.append(flag + equals + _HIDDEN if is_secret and equals else word)
        hide_next = is_secret and not equals
    return shown
