"""The folder of a run's checkpoints: which of them is to be loaded, and how one appears as a whole.

A checkpoint is written beside its final name, moved into place when all its files are there, and
named by Megatron's tracker file last; an old one is moved away before it is deleted.  So every
``iter_*`` folder is complete, and a kill at any moment leaves the previous one loadable.
Invariant the tests check: after a kill at any file operation the newest checkpoint that was ever
complete, or the one before it, loads.  A lock (run_folders.py) keeps two jobs apart.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from uuid import uuid4

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's file that names the checkpoint to load: a step, or ``release``."""
RELEASE = "release"
"""Megatron's folder of weights without a step."""
_UNFINISHED = (".partial-", ".deleted-")


def folder_of(root: Path, step: int) -> Path:
    """Megatron's folder name of a step."""
    return root / f"iter_{step:07d}"


def is_complete(folder: Path) -> bool:
    """Whether a folder holds all of a ``torch_dist`` checkpoint (its metadata.json comes last)."""
    return not _lacks(folder)


def incomplete(root: Path) -> list[str]:
    """Folders of steps that are no complete checkpoints, and why, newest first."""
    folders = sorted((path for path in root.glob("iter_*") if path.is_dir()), reverse=True)
    named = [path for path in folders if path.name[5:].isdigit()]
    return [f"{path.name}: {lack}" for path in named if (lack := _lacks(path))]


def _lacks(folder: Path) -> str:
    try:
        json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "metadata.json is missing or damaged"
    return "" if (folder / ".metadata").is_file() else ".metadata is missing"


def complete_steps(root: Path) -> list[int]:
    """Steps with a complete checkpoint under ``root``, oldest first."""
    names = [path.name[5:] for path in root.glob("iter_*") if is_complete(path)]
    return sorted(int(name) for name in names if name.isdigit())


def newest(root: Path, *, step: int | None = None) -> Path | None:
    """The checkpoint to load: of ``step``, else the tracker's, else the newest; None without any.

    Raises:
        ValueError: there is no complete checkpoint of ``step``.
    """
    steps = complete_steps(root)
    if step is not None:
        if step not in steps:
            raise ValueError(
                f"--ckpt-step {step}: {root} holds no complete checkpoint of that step"
                f"{_because(folder_of(root, step))}. It holds "
                f"{', '.join(map(str, steps)) or 'none'}."
            )
        return folder_of(root, step)
    try:
        tracked = (root / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        tracked = None
    if tracked == RELEASE and is_complete(root / RELEASE):
        return root / RELEASE
    if tracked is not None and tracked in map(str, steps):
        return folder_of(root, int(tracked))
    if not steps:
        return None
    if tracked is not None:
        logger.warning(
            "%s says %r, which is no complete checkpoint here%s: the newest, of step %d, is taken",
            root / TRACKER,
            tracked[:40],
            _because(folder_of(root, int(tracked))) if tracked.isdecimal() else "",
            steps[-1],
        )
    return folder_of(root, steps[-1])


def _because(folder: Path) -> str:
    return f" ({folder.name}: {_lacks(folder)})" if folder.is_dir() else ""


def check_writable(root: Path) -> None:
    """Create the folder if need be and write a file to it.

    Raises:
        OSError: that is not possible; names --save and the reason.
    """
    probe = root / ".writable"
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"\0" * 4096)
        probe.unlink()
    except OSError as error:
        raise OSError(
            error.errno,
            f"--save {root} cannot be written to ({error.strerror}): make room there, or choose a "
            "folder that this user may create and write to",
        ) from error


def begin(folder: Path) -> Path:
    """A new, empty folder beside ``folder`` to write to; what a kill left of earlier ones goes.

    Its name is its own, so that a process that outlived a kill cannot write into it.
    """
    clear_unfinished(folder.parent, folder.name)
    partial = _beside(folder, ".partial-")
    partial.mkdir(parents=True)
    return partial


def clear_unfinished(root: Path, pattern: str) -> None:
    """Delete what kills left of checkpoints that were being written or deleted."""
    for mark in _UNFINISHED:
        for leftover in root.glob(f"{pattern}{mark}*"):
            shutil.rmtree(leftover, ignore_errors=True)


def put_in_place(partial: Path, folder: Path) -> None:
    """Move a written folder to its name; one that has the name already is deleted."""
    _to_disk(partial / "metadata.json")
    _to_disk(partial)
    replaced = _set_aside(folder) if folder.exists() else None
    partial.rename(folder)
    _to_disk(folder.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def publish(partial: Path, *, root: Path, step: int, keep: int) -> None:
    """Make a written folder the checkpoint of ``step``, the one to load; delete what is too old.

    keep: newest checkpoints kept, this one included; 0 = all.
    """
    put_in_place(partial, folder_of(root, step))
    _replace_text(root / TRACKER, str(step))
    earlier = [other for other in complete_steps(root) if other <= step]
    for other in earlier[:-keep] if keep else []:
        shutil.rmtree(_set_aside(folder_of(root, other)), ignore_errors=True)


def discard(root: Path, step: int) -> None:
    """Delete the checkpoint of a step, if there is one."""
    folder = folder_of(root, step)
    if folder.exists():
        shutil.rmtree(_set_aside(folder), ignore_errors=True)


def free_space(root: Path) -> str:
    """How much room the disk of ``root`` has left, for an error message."""
    return f"{shutil.disk_usage(root).free / 2**30:.1f} GiB"


def _beside(folder: Path, mark: str) -> Path:
    return folder.with_name(f"{folder.name}{mark}{uuid4().hex[:8]}")


def _set_aside(folder: Path) -> Path:
    """Take a folder's name away, so that nothing loads it while it is deleted; its new path."""
    return folder.rename(_beside(folder, ".deleted-"))


def _replace_text(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}")
    beside.write_text(text, encoding="utf-8")
    _to_disk(beside)
    beside.replace(path)
    _to_disk(path.parent)


def _to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, survives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
