"""R6: a disk that is full at any byte leaves whole lines, and goes on when there is room."""

from __future__ import annotations

import errno
import os
import resource
import signal
from pathlib import Path

import pytest

from megatron_ext.files.appended import AppendedFile

LINES = [b"%d" % n * n + b"\n" for n in range(1, 9)]


def full_at(path: Path, limit: int) -> None:
    """Append all lines where no file may have more bytes, then again without the limit."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    file, hard = AppendedFile(path), resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    left = []
    for line in LINES:
        try:
            file.append(line)
        except OSError as error:
            assert error.errno == errno.EFBIG
            left.append(line)
    assert path.read_bytes() == b"".join(line for line in LINES if line not in left)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    for line in left:
        file.append(line)


def test_r6_a_line_that_does_not_fit_leaves_no_half(tmp_path: Path):
    for limit in range(0, sum(map(len, LINES)), 3):
        path, child = tmp_path / str(limit), os.fork()
        if child == 0:
            code = 1
            try:
                full_at(path, limit)
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert sorted(path.read_bytes().splitlines(keepends=True)) == LINES


@pytest.mark.skipif(os.getuid() == 0, reason="root may write where others may not")
def test_r6_a_folder_that_cannot_be_written_to_is_an_error(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(OSError):
        AppendedFile(tmp_path / "a").append(b"1\n")
    tmp_path.chmod(0o700)
