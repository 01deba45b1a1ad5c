"""Paths that cannot be what their options take them for, seen before any work is done.

Invariant the tests check: a folder that passes can be made and written to; nothing is left there.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

RUN_FOLDERS = {"--save": "LOCAL_RANK", "--output-dir": "RANK"}
"""Folders that a run writes to -> the variable that is 0 on the processes that look: --save may lie
on a disk of each node, --output-dir is the first rank's."""
_INPUT_FILES = ("--train-data", "--valid-data")
_INPUTS = ("--hf-model", "--tokenizer-model", "--te-precision-config-file")


def path_problems(values: Mapping[str, str | None]) -> list[str]:
    """What is wrong with the paths of a command line, by flag; others in it are not looked at."""
    given = {flag: value for flag, value in values.items() if value}
    found = []
    for flag, variable in RUN_FOLDERS.items():
        if flag in given and os.environ.get(variable, "0") == "0":
            found += folder_problems(given[flag], flag=flag)
    for flag in ("--load", "--pretrained-checkpoint"):
        if flag in given and Path(given[flag]).is_file():
            found.append(f"{flag} {given[flag]} is a file: name the folder of the checkpoints.")
    for flag in _INPUTS:
        if flag in given and not Path(given[flag]).exists():
            found.append(f"{flag} {given[flag]} does not exist: check the path (no downloads).")
    for flag in _INPUT_FILES:
        if flag in given and Path(given[flag]).is_dir():
            found.append(f"{flag} {given[flag]} is a folder: name a file.")
    if "--wandb-project" in given and not values.get("--output-dir"):
        found.append(
            f"--wandb-project {given['--wandb-project']} needs --output-dir: the id of the wandb "
            "run is kept there, so that a resumed run continues it. Name a folder, or drop the "
            "flag."
        )
    return found


def file_problems(values: Mapping[str, str], flags: Sequence[str]) -> list[str]:
    """What is wrong with files that are to be read, by flag."""
    found = []
    for flag in flags:
        path = Path(values.get(flag, ""))
        if flag in values and not path.is_file():
            what = "a folder: name a file" if path.is_dir() else "no file: check the path"
            found.append(f"{flag} {path} is {what}.")
    return found


def folder_problems(folder: str, *, flag: str) -> list[str]:
    """Why a folder cannot be created and written to; a folder is made in it, or above, to see."""
    place = Path(folder).absolute()
    if place.exists() and not place.is_dir():
        return [f"{flag} {folder} is a file: name a folder."]
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        return [f"{flag} {folder} lies under {place}, which is a file: name another folder."]
    try:
        Path(tempfile.mkdtemp(prefix=".writable-", dir=place)).rmdir()
    except OSError as error:
        return [
            f"{flag} {folder} cannot be written to ({place}: {error.strerror}): choose a folder "
            "that this user may create and write to."
        ]
    return []
