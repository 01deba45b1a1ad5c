"""When a run saves its checkpoints, and how it ends early.

    checkpoints = Checkpoints(options, stepper, stop, samples_id=samples_id, start=start)
    for step in ...:
        checkpoints.finished(step, consumed_samples=...)     # what a checkpoint would be of
        ...                                                  # evaluate and record it
        checkpoints.after_step()                             # saves; raises RunStopped

Invariant the tests check: whatever ends a run, it goes on bit for bit as one that was left alone.
"""

from __future__ import annotations

import copy
import logging
import time
from pathlib import Path
from typing import Any, NoReturn

from megatron_ext.upstream import checkpoint
from megatron_ext.upstream.arguments import Options
from megatron_ext.upstream.checkpoint import Progress
from megatron_ext.upstream.checkpoint_folder import discard
from megatron_ext.upstream.checkpoint_random import random_states, restore_random
from megatron_ext.upstream.checkpoint_tensors import on_writer
from megatron_ext.upstream.step import Stepper
from megatron_ext.upstream.stopping import Stopping, stopped

logger = logging.getLogger(__name__)


class Checkpoints:
    """Saves the last finished step of a run."""

    def __init__(
        self,
        options: Options,
        stepper: Stepper,
        stop: Stopping,
        *,
        samples_id: str,
        start: Progress,
    ) -> None:
        """Collective.  start: where the run begins, new or resumed."""
        self._args = options.megatron
        self._config = options.checkpoint
        self._stepper = stepper
        self._stop = stop
        self._samples_id = samples_id
        self._saved_step = start.step
        self._saved_at = time.monotonic()
        self._by_time: list[int] = []
        """Steps whose checkpoints are there for a lost run only; the older ones are deleted."""
        self._progress = start
        self._random: list[Any] = []
        self._remember_random()

    def finished(self, step: int, *, consumed_samples: int, idle_steps: int = 0) -> None:
        """A step has made its last update.  Collective."""
        self._progress = Progress(
            step=step, consumed_samples=consumed_samples, idle_steps=idle_steps
        )
        self._remember_random()

    def after_step(self) -> None:
        """Save if it is time to, and end the run if any rank was told to.  Collective.

        Raises:
            OSError: it could not be saved.
            RunStopped: the run ends.
        """
        args, step = self._args, self._progress.step
        minutes = self._config.save_interval_minutes or 0.0
        is_late = minutes > 0 and time.monotonic() - self._saved_at >= 60 * minutes
        code, is_late = self._stop.agree(step=step, also=is_late and self._stepper.layout.is_writer)
        is_last = step == args.train_iters
        if is_last or code or (args.save_interval and step % args.save_interval == 0):
            self._save()
        elif is_late:
            self._save_in_time()
        if code and not is_last:
            raise stopped(code, step=step, is_saved=self._is_saved())

    def after_dropped_step(self) -> NoReturn:
        """End the run after a step that was given up, with a checkpoint of the one before it.
        Collective.

        Raises:
            OSError: it could not be saved.
            RunStopped: the run ends.
        """
        restore_random(self._random, layout=self._stepper.layout)
        code, _ = self._stop.agree(step=0)
        self._save()
        raise stopped(code, step=self._progress.step, is_saved=self._is_saved())

    def _is_saved(self) -> bool:
        return bool(self._args.save) and 0 < self._progress.step == self._saved_step

    def _save(self) -> None:
        step = self._progress.step
        if not self._args.save or step in (0, self._saved_step):
            return
        layout = self._stepper.layout
        checkpoint.save(
            self._args,
            self._stepper.model,
            layout,
            progress=self._progress,
            samples_id=self._samples_id,
            keep=self._config.keep_checkpoints,
        )
        self._saved_step, self._saved_at = step, time.monotonic()
        too_old, self._by_time = self._by_time[:-1], self._by_time[-1:]
        on_writer(layout, lambda: [discard(Path(self._args.save), old) for old in too_old])

    def _save_in_time(self) -> None:
        """Save what the flags did not ask for: a disk without room for it does not end the run."""
        try:
            self._save()
        except OSError as error:
            self._saved_at = time.monotonic()
            if self._stepper.layout.is_writer:
                logger.warning("%s The run goes on, and tries again later.", error)
            return
        if self._is_saved():
            self._by_time.append(self._saved_step)

    def _remember_random(self) -> None:
        """Keep the random states that a checkpoint of this moment would have."""
        _, own = random_states(self._stepper.layout).values()
        saved: Any = own.data
        self._random = copy.deepcopy(saved)
