"""The folders of a run: --output-dir and --save are its own while it goes, and what it records."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from megatron_ext.files.lock import LOCK_NAME, hold
from megatron_ext.report.recorder import RunRecorder
from megatron_ext.upstream.arguments import Options
from megatron_ext.upstream.checkpoint import Progress
from megatron_ext.upstream.checkpoint_tensors import on_writer
from megatron_ext.upstream.layout import Layout


@contextmanager
def held_folders(options: Options, layout: Layout) -> Iterator[None]:
    """Hold the run's folders in a block, on the writing rank.  Collective.

    Raises, on every rank:
        OSError: a folder cannot be created or written to.
        ValueError: another run holds one; names its host, process id and start.
    """
    named = {"--output-dir": options.report.output_dir, "--save": options.megatron.save}
    folders = {Path(path).resolve(): f"{flag} {path}" for flag, path in named.items() if path}
    with ExitStack() as held:

        def take() -> None:
            for folder, what in folders.items():
                _take(held, folder, what=what)

        on_writer(layout, take)
        yield


def _take(held: ExitStack, folder: Path, *, what: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held.enter_context(hold(folder / LOCK_NAME, what=what))
    except OSError as error:
        raise OSError(
            error.errno,
            f"{what} cannot be written to ({error.strerror}): make room there, or choose a folder "
            "that this user may create and write to",
        ) from error


def open_recorder(options: Options, layout: Layout, *, start: Progress) -> RunRecorder:
    """What records the run's metrics, on the writing rank.  Collective.

    Raises:
        OSError: --output-dir cannot be used.
    """
    args = options.megatron
    is_writer = layout.is_writer
    opened = partial(
        RunRecorder,
        options.report,
        is_writer=is_writer,
        options=options.as_record(),
        total_steps=args.train_iters,
        resume_step=start.step or None,
        world_size=args.world_size,
        wandb_project=args.wandb_project or None,
        wandb_name=args.wandb_exp_name or None,
    )
    recorders: list[RunRecorder] = [] if is_writer else [opened()]
    on_writer(layout, lambda: recorders.append(opened()))
    return recorders[0]
