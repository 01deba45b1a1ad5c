"""Fixtures of all tests: `ranks`, the session's pool of gloo ranks."""

from __future__ import annotations

import os
import signal

# Before torch is imported: one thread, as in the ranks, so that a sum has the same order in both.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections import Counter
from pathlib import Path

import pytest

from tests.ranks import RankPool

POOL = pytest.StashKey[RankPool]()


def pytest_configure(config: pytest.Config) -> None:
    """Make the pool; it starts nothing yet.

    A shell that runs this in the background has it ignore Ctrl-C, and nohup hang-ups: what inherits
    that could not test what signals do.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    config.stash[POOL] = RankPool()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with whole jobs and slow tests first: what is long must not be left to one process at
    the end."""
    cost = Counter[Path]()
    for item in items:
        is_job, is_slow = (item.get_closest_marker(name) is not None for name in ("e2e", "slow"))
        cost[item.path] += 400 if is_job else 50 if is_slow else 3
    items.sort(key=lambda item: -cost[item.path])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the pool import Megatron in the background, if a selected test needs it."""
    is_needed = any("ranks" in getattr(item, "fixturenames", ()) for item in session.items)
    if is_needed and not session.config.option.collectonly:
        session.config.stash[POOL].start()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the processes of the pool, however the session ended."""
    config.stash[POOL].close()


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> RankPool:
    """`ranks(n).run(function, *args, timeout=60, **kwargs)`: what each rank returned."""
    return request.config.stash[POOL]
