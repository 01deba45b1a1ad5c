"""Which checkpoint a run starts from: --load, --ckpt-step, --finetune, --pretrained-checkpoint.

A run that starts anew never writes over the checkpoints of another one: that is refused at once.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.upstream.checkpoint_folder import (
    RELEASE,
    check_writable,
    complete_steps,
    newest,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint and what is taken from it."""

    folder: Path
    only_weights: bool
    """A new run starts from its weights; else the run that saved it goes on."""

    @property
    def step(self) -> int:
        """Finished updates of the run that starts from it."""
        return 0 if self.only_weights else int(self.folder.name.removeprefix("iter_"))


def find_source(args: Namespace) -> Source | None:
    """What the flags say to start from; None: from new weights.

    ``--load`` may be empty when it is ``--save`` as well, so that one command starts a run and
    continues it; ``--pretrained-checkpoint`` counts only as long as ``--load`` is empty.

    Raises:
        ValueError: there is no such checkpoint.
    """
    source = _loaded(args) or _pretrained(args)
    if source is None and args.load and (not _is_own(args) or args.exit_on_missing_checkpoint):
        raise ValueError(_absent("load", args.load))
    return source


def check_target(args: Namespace, source: Source | None) -> None:
    """Create ``--save`` and see that the run, from where it starts, may write there.

    Raises:
        OSError: it cannot be written to.
        ValueError: it holds checkpoints of another run.
    """
    if not args.save:
        return
    check_writable(Path(args.save))
    start = source.step if source else 0
    later = [step for step in complete_steps(Path(args.save)) if step > start]
    if later and _is_own(args) and source is not None and not source.only_weights:
        logger.warning(
            "--save %s also holds later steps (%s): each is replaced when the run gets there",
            args.save,
            ", ".join(map(str, later)),
        )
    elif later:
        raise ValueError(
            f"--save {args.save} holds checkpoints of another run, up to step {later[-1]}, and "
            f"this run starts at step {start}: continue that one with --load {args.save} (and "
            "without --finetune), or choose another --save."
        )


def _loaded(args: Namespace) -> Source | None:
    folder = newest(Path(args.load), step=args.ckpt_step) if args.load else None
    if folder is None:
        return None
    return Source(folder=folder, only_weights=args.finetune or folder.name == RELEASE)


def _pretrained(args: Namespace) -> Source | None:
    if args.pretrained_checkpoint is None:
        return None
    folder = newest(Path(args.pretrained_checkpoint))
    if folder is None:
        raise ValueError(_absent("pretrained-checkpoint", args.pretrained_checkpoint))
    return Source(folder=folder, only_weights=True)


def _is_own(args: Namespace) -> bool:
    """Whether the run loads what it saves."""
    return bool(args.load and args.save) and Path(args.load).resolve() == Path(args.save).resolve()


def _absent(flag: str, path: str) -> str:
    return (
        f"--{flag} {path} holds no complete checkpoint in the torch_dist format: check the path "
        "(it is the folder that holds iter_0000001 and its like)."
    )
