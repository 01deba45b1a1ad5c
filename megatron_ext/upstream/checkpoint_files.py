"""The files of one checkpoint folder: which there must be, how long they are, their checksums.

``checksums.json`` lies beside Megatron's files and names every one of them with its bytes and its
CRC-32, made from what the disk holds after writing.  CRC-32 finds every single flipped byte and is
an order of magnitude faster than a disk; it is no protection against intent (docs/security.md).
Invariant the tests check: cut short, emptied, missing or with one other byte, a file is named.
Not covered: which ranks look at which file (checkpoint_shared.py).
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from megatron_ext.upstream.checkpoint_pickles import (
    METADATA,
    DamagedCheckpointError,
    read_metadata,
    reading,
)

CHECKSUMS = "checksums.json"
_CONFIG = "metadata.json"
_COMMON = ("common.pt", "common_state/shard_0_1")
"""Where Megatron keeps what is no tensor: formerly a file, now an entry."""
_BLOCK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """What a file must be."""

    num_bytes: int
    crc32: int


def record_of(path: Path) -> FileRecord:
    """Length and CRC-32 of a file."""
    crc, num_bytes = 0, 0
    buffer = memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
            num_bytes += count
    return FileRecord(num_bytes=num_bytes, crc32=crc)


def names_in(folder: Path) -> list[str]:
    """The files of a checkpoint that have a checksum."""
    return sorted(p.name for p in folder.iterdir() if p.is_file() and p.name != CHECKSUMS)


def needed_bytes(metadata: Metadata) -> dict[str, int]:
    """The files that ``.metadata`` names, and how long each must be at least."""
    needed: dict[str, int] = {}
    for place in (metadata.storage_data or {}).values():
        name, end = place.relative_path, place.offset + place.length
        needed[name] = max(needed.get(name, 0), end)
    return needed


def structure_problems(folder: Path) -> list[str]:
    """What is missing or cut short in a checkpoint, as far as its small files tell.

    Raises:
        UnsafeCheckpointError: ``.metadata`` is not to be trusted.
    """
    try:
        with reading(folder / _CONFIG):
            json.loads((folder / _CONFIG).read_text(encoding="utf-8"))["sharded_backend"]
        metadata = read_metadata(folder)
        with reading(folder / METADATA):
            needed = needed_bytes(metadata)
    except DamagedCheckpointError as error:
        return [_without_folder(error, folder)]
    problems = size_problems(folder, needed)
    if not (folder / _COMMON[0]).is_file() and _COMMON[1] not in metadata.state_dict_metadata:
        problems.append(f"{METADATA} names no entry {_COMMON[1]}, and there is no {_COMMON[0]}")
    return problems


def size_problems(folder: Path, needed: Mapping[str, int]) -> list[str]:
    """Files that are missing or shorter than they must be."""
    problems = []
    for name, num_bytes in sorted(needed.items()):
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            problems.append(f"{name} is missing ({error.strerror})")
            continue
        if found < num_bytes:
            problems.append(f"{name} has {found} bytes of at least {num_bytes}")
    return problems


def write_checksums(folder: Path, records: Mapping[str, FileRecord]) -> None:
    """Write ``checksums.json``; it is on the disk afterwards."""
    files = {
        name: {"bytes": record.num_bytes, "crc32": f"{record.crc32:08x}"}
        for name, record in sorted(records.items())
    }
    text = json.dumps({"algorithm": "crc32", "files": files}, indent=1) + "\n"
    with (folder / CHECKSUMS).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_checksums(folder: Path) -> dict[str, FileRecord] | None:
    """What ``write_checksums`` wrote; None: the checkpoint has none (Megatron saved it).

    Raises:
        DamagedCheckpointError: it cannot be read.
    """
    path = folder / CHECKSUMS
    if not path.exists():
        return None
    with reading(path):
        return {
            Path(name).name: FileRecord(num_bytes=int(of["bytes"]), crc32=int(of["crc32"], 16))
            for name, of in json.loads(path.read_text(encoding="utf-8"))["files"].items()
        }


def checksum_problems(
    folder: Path, names: Iterable[str], records: Mapping[str, FileRecord]
) -> list[str]:
    """Those of the named files that are not what their record says."""
    problems = []
    for name in names:
        wanted = records[name]
        try:
            found = record_of(folder / name)
        except OSError as error:
            problems.append(f"{name} cannot be read ({error.strerror})")
            continue
        if found.num_bytes != wanted.num_bytes:
            problems.append(f"{name} has {found.num_bytes} bytes, not {wanted.num_bytes}")
        elif found.crc32 != wanted.crc32:
            problems.append(f"{name} is damaged (another checksum than when it was saved)")
    return problems


def _without_folder(error: Exception, folder: Path) -> str:
    return str(error).replace(f"{folder}{os.sep}", "")
