"""The only place that has Megatron read a checkpoint: known types, and errors that name a file.

Not covered: what a checkpoint must contain (checkpoint_fit.py).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ext.upstream.checkpoint_pickles import (
    DamagedCheckpointError,
    UnsafeCheckpointError,
    known_types,
    reading,
)


def common_of(folder: Path) -> dict[str, Any]:
    """What a checkpoint holds beside tensors: arguments, position, schedule.

    Raises:
        DamagedCheckpointError: it is missing or cannot be read.
        UnsafeCheckpointError: it asks for other than known types.
    """
    with _of(folder):
        common = dist_checkpointing.load_common_state_dict(str(folder))
        args = common.get("args") if isinstance(common, dict) else None
        if not isinstance(common, dict) or not isinstance(args, Namespace | None):
            raise DamagedCheckpointError(f"{folder} holds no arguments that Megatron saves")
    return common


def contents_of(folder: Path) -> dict[str, Any]:
    """A checkpoint's tensors and objects without their values.  Raises as `common_of` does."""
    with _of(folder):
        return load_sharded_metadata(str(folder))


def values_of(folder: Path, state: dict[str, Any], *arguments: Any, **options: Any) -> Any:
    """The checkpoint's values for a state; the rest as for ``dist_checkpointing.load``.

    Collective.  Raises as `common_of` does.
    """
    with _of(folder):
        return dist_checkpointing.load(state, str(folder), *arguments, **options)


def damaged(folder: Path, problems: Sequence[str]) -> DamagedCheckpointError:
    """The error that says what is wrong with a checkpoint's files, and what to do."""
    return DamagedCheckpointError(
        f"{folder} is damaged: {'; '.join(problems)}. Nothing was loaded. Copy it again, or use "
        "another one (--ckpt-step names a step)."
    )


@contextmanager
def _of(folder: Path) -> Iterator[None]:
    """Reading a checkpoint in the block ends in its values or in one of two errors."""
    try:
        with known_types(), reading(folder):
            yield
    except CheckpointException as error:  # PyTorch's, of what its reader raised
        causes = [cause for cause, _ in error.failures.values()]
        for cause in causes:
            if isinstance(cause, DamagedCheckpointError | UnsafeCheckpointError):
                raise cause from None
        raise DamagedCheckpointError(f"{folder} cannot be read ({causes[0]})") from error
    except CheckpointingException as error:
        raise DamagedCheckpointError(f"{folder} cannot be read ({error})") from error
