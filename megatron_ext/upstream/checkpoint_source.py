"""Which checkpoint a run starts from: --load, --ckpt-step, --finetune, --pretrained-checkpoint.

A run that starts anew never writes over the checkpoints of another one: that is refused at once.
A damaged checkpoint is stepped over: the newest intact one before it is taken, with a warning.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megatron_ext.upstream.checkpoint_folder import (
    RELEASE,
    check_writable,
    complete_steps,
    folder_of,
    incomplete,
    newest,
)
from megatron_ext.upstream.checkpoint_reading import damaged
from megatron_ext.upstream.checkpoint_shared import on_writer, problems_of
from megatron_ext.upstream.layout import Layout

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
    if source is None and args.load and (broken := incomplete(Path(args.load))):
        raise ValueError(
            f"--load {args.load} holds no complete checkpoint: {'; '.join(broken)}. Copy one again "
            "from elsewhere; or delete what is there, or choose another folder, to start anew."
        )
    if source is None and args.load and (not _is_own(args) or args.exit_on_missing_checkpoint):
        raise ValueError(_absent("load", args.load))
    return source


def intact_source(args: Namespace, layout: Layout) -> Source | None:
    """What `find_source` says, all its files looked at; the newest intact step before it, if it is
    damaged and no step was asked for.  Collective.

    Raises:
        ValueError: there is no such checkpoint, none is intact, or it is not to be trusted.
    """
    source = on_writer(layout, lambda: find_source(args))
    if source is None:
        return None
    folder = newest_intact(
        source.folder,
        older=[]
        if args.ckpt_step is not None
        else on_writer(layout, partial(older, source.folder)),
        problems_in=lambda folder: problems_of(
            folder, layout, with_checksums=args.verify_checksums
        ),
        is_told=layout.is_writer,
    )
    return replace(source, folder=folder)


def newest_intact(
    first: Path, *, older: list[Path], problems_in: Callable[[Path], list[str]], is_told: bool
) -> Path:
    """The first of these checkpoints without a problem.

    is_told: this process warns of those that are stepped over.

    Raises:
        DamagedCheckpointError: there is none.
    """
    found = {}
    for folder in (first, *older):
        found[folder] = problems_in(folder)
        if not found[folder]:
            break
    else:
        if len(found) == 1:
            raise damaged(first, found[first])
        raise damaged(first.parent, [f"{f.name}: {'; '.join(p)}" for f, p in found.items()])
    for passed in list(found)[:-1] if is_told else ():
        logger.warning(
            "%s is damaged: %s; %s is taken instead", passed, "; ".join(found[passed]), folder.name
        )
    return folder


def older(folder: Path) -> list[Path]:
    """The complete checkpoints before one of a step, newest first; none before a release."""
    root, step = folder.parent, folder.name.removeprefix("iter_")
    steps = complete_steps(root) if step.isdigit() else []
    return [folder_of(root, other) for other in reversed(steps) if other < int(step)]


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
