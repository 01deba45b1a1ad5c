"""What all ranks find out together about a checkpoint's files, each looking at its own share.

After writing, every rank says which files it wrote and what it reads back of them; the writing rank
compares that with ``.metadata`` and with its own folder, so that a folder that is not the same disk
on every host is never called a checkpoint.  Before loading, every file is read by one rank.
Invariant the tests check: no rank goes on unless all do, with one message on all of them.
"""

from __future__ import annotations

import heapq
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch.distributed

from megatron_ext.upstream.checkpoint_files import (
    FileRecord,
    checksum_problems,
    names_in,
    needed_bytes,
    read_checksums,
    record_of,
    size_problems,
    structure_problems,
    write_checksums,
)
from megatron_ext.upstream.checkpoint_pickles import (
    DamagedCheckpointError,
    UnsafeCheckpointError,
    read_metadata,
)
from megatron_ext.upstream.checkpoint_reading import common_of
from megatron_ext.upstream.layout import Layout

logger = logging.getLogger(__name__)

SETTLING_SECONDS = 10.0
"""How long a network file system may take to show one host what another one wrote."""
_ONE_FOLDER = (
    "Every host must see the same disk there: use a folder on a network file system. Checkpoints "
    "that were complete before are as they were."
)


class NotOneFolderError(OSError):
    """Ranks that should write to one folder write to different ones."""


def gathered(value: Any) -> list[Any]:
    """What every rank gave, in rank order.  Collective."""
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, value)
    return found


def on_writer[Result](layout: Layout, action: Callable[[], Result]) -> Result:
    """Do it on the writing rank; its result, or its error, on every rank.  Collective."""
    outcome: list[Any] = [None, None]
    if layout.is_writer:
        try:
            outcome[0] = action()
        except (OSError, ValueError) as error:
            outcome[1] = error
    torch.distributed.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def in_order[Result](action: Callable[[], Result]) -> Result:
    """Do it on every rank; if it is refused on one, on all with the first one's message.

    Collective.
    """
    result, error = None, None
    try:
        result = action()
    except (DamagedCheckpointError, UnsafeCheckpointError, OSError) as own:
        error = own
    errors = [other for other in gathered(error) if other is not None]
    if errors:
        raise error or errors[0]
    return result  # type: ignore[return-value]  # there was no error


def seal(folder: Path, layout: Layout) -> None:
    """See that all ranks' files are in the writing rank's folder; add their checksums to it.

    folder: just written, as this rank names it.  Collective.

    Raises:
        NotOneFolderError: ranks have written to different folders; says which host wrote what.
    """
    rank = torch.distributed.get_rank()
    mine = in_order(lambda: {p.name: record_of(p) for p in folder.glob(f"__{rank}_*.distcp")})
    reports = gathered((socket.gethostname(), folder, mine))
    on_writer(layout, lambda: _seal(folder, reports))


def check_one_folder(root: Path, layout: Layout) -> None:
    """See that what the writing rank writes to ``root``, all ranks find in theirs.  Collective.

    Raises:
        NotOneFolderError: they do not, naming the hosts.
    """
    if torch.distributed.get_world_size() == 1:
        return
    host = socket.gethostname()
    name, writer = on_writer(layout, lambda: (_probe(root), host))
    is_seen = _settled(lambda: _exists(root / name), patient=host != writer)
    blind = [
        f"rank {rank} on {other}"
        for rank, (other, sees) in enumerate(gathered((host, is_seen)))
        if not sees
    ]
    on_writer(layout, lambda: (root / name).unlink(missing_ok=True))
    if blind:
        raise NotOneFolderError(
            f"--save {root} is not one folder: what rank 0 on {writer} writes there is not seen by "
            f"{', '.join(blind[:8])}. {_ONE_FOLDER}"
        )


def problems_of(folder: Path, layout: Layout, *, with_checksums: bool) -> list[str]:
    """What is wrong with a checkpoint's files; every file is read by one rank.  Collective.

    with_checksums: else only what is missing or cut short is found.

    Raises:
        UnsafeCheckpointError: it is not to be trusted.
    """
    records, found = on_writer(layout, lambda: _of_small_files(folder))
    if not found and records is not None:
        host = socket.gethostname()
        if os.environ.get("LOCAL_RANK", "0") == "0":
            sizes = {name: record.num_bytes for name, record in records.items()}
            found = [f"{problem} on {host}" for problem in size_problems(folder, sizes)]
        if not found and with_checksums:
            rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
            found = checksum_problems(folder, shares(records, size)[rank], records)
        found = [problem for part in gathered(found) for problem in part]
    return sorted(set(found))


def problems_alone(folder: Path) -> list[str]:
    """The same by one process that has joined no job."""
    records, found = _of_small_files(folder)
    return found or checksum_problems(folder, sorted(records or {}), records or {})


def shares(records: Mapping[str, FileRecord], size: int) -> list[list[str]]:
    """The files that each of ``size`` ranks reads: about as many bytes for each."""
    parts: list[list[str]] = [[] for _ in range(size)]
    loads = [(0, index) for index in range(size)]
    for name in sorted(records, key=lambda n: (-records[n].num_bytes, n)):
        load, index = heapq.heappop(loads)
        parts[index].append(name)
        heapq.heappush(loads, (load + records[name].num_bytes, index))
    return parts


def _of_small_files(folder: Path) -> tuple[dict[str, FileRecord] | None, list[str]]:
    """The checksums of a checkpoint, and what its small files show to be wrong."""
    try:
        found = structure_problems(folder)
        records = read_checksums(folder)
        if not found and records is None:
            common_of(folder)  # the only large file whose content is looked at without checksums
            logger.warning(
                "%s has no checksums.json: only files that are missing or cut short are found",
                folder,
            )
    except DamagedCheckpointError as error:
        return None, [str(error).replace(f"{folder}{os.sep}", "")]
    return records, found


def _seal(folder: Path, reports: list[tuple[str, Path, dict[str, FileRecord]]]) -> None:
    needed = needed_bytes(read_metadata(folder))
    records, wrote = {}, {}
    for rank, (host, where, files) in enumerate(reports):
        records |= files
        needed |= {name: record.num_bytes for name, record in files.items()}
        wrote |= {name: f"rank {rank} on {host} wrote it to {where}" for name in files}
    is_on_one_host = len({host for host, _, _ in reports}) == 1
    if not _settled(lambda: not size_problems(folder, needed), patient=not is_on_one_host):
        lost = [
            f"{problem}: {wrote.get(problem.split()[0], 'no rank says that it wrote it')}"
            for problem in size_problems(folder, needed)
        ]
        raise NotOneFolderError(
            f"--save {folder.parent} is not one folder: of the files that the ranks have written, "
            f"rank 0 on {reports[0][0]} does not find all in {folder}. {'; '.join(lost[:8])}. "
            f"{_ONE_FOLDER}"
        )
    others = set(names_in(folder)) - records.keys()
    write_checksums(folder, records | {name: record_of(folder / name) for name in others})


def _probe(root: Path) -> str:
    """Write a file that only this run knows; its name."""
    name = f".probe-{uuid4().hex}"
    with (root / name).open("wb") as file:
        os.fsync(file.fileno())
    return name


def _exists(path: Path) -> bool:
    """Whether a file is there; opening its folder has NFS ask the server again."""
    with suppress(OSError):
        os.close(os.open(path.parent, os.O_RDONLY))
    return path.exists()


def _settled(is_true: Callable[[], bool], *, patient: bool) -> bool:
    """Whether something is true, or becomes so as long as a network file system may take."""
    deadline = time.monotonic() + (SETTLING_SECONDS if patient else 0)
    while not is_true():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.5)
    return True
