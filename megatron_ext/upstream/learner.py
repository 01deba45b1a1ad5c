"""Megatron as the policy of the reinforcement-learning loop (`rl.policy.Policy`).

Sampler and trainer share the model's chunks, so an update is visible to the next rollout without a
copy.  The reference policy is a copy of the weights the run began with; it is saved beside the
checkpoints, so that a resumed run has the same one, on any layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ext.packing.types import Microbatch
from megatron_ext.rl.objective import PolicyObjective
from megatron_ext.rl.policy import Update
from megatron_ext.rollout.engine import RolloutEngine
from megatron_ext.upstream.arguments import Options
from megatron_ext.upstream.checkpoint_folder import clear_unfinished, free_space
from megatron_ext.upstream.checkpoint_tensors import load_weights, on_writer, save_weights
from megatron_ext.upstream.evaluate import token_values
from megatron_ext.upstream.microbatches import to_device
from megatron_ext.upstream.rollout import MegatronDecoder
from megatron_ext.upstream.step import Stepper
from megatron_ext.upstream.update import skip_update, update

REFERENCE = "reference"
"""Folder of the reference policy's weights in --save."""


class MegatronLearner:
    """A trainable model that also samples."""

    def __init__(self, options: Options, stepper: Stepper, *, is_new: bool) -> None:
        """Collective.

        is_new: the run starts here; else it goes on and its reference policy is that of --load.

        Raises:
            OSError: the reference policy cannot be written to --save.
            ValueError: the model cannot decode, or a resumed run has no reference policy.
        """
        self.stepper = stepper
        self.layout = stepper.layout
        self._args = options.megatron
        decoder = MegatronDecoder(options.megatron, stepper.layout, stepper.model.chunks)
        self.engine = RolloutEngine(decoder, options.rollout)
        self._reference: list[Tensor] = []
        if options.algorithm.needs_reference:
            self._open_reference(is_new)

    @property
    def dp_size(self) -> int:
        """Replicas that roll out different prompts."""
        return self.layout.dp_size

    @property
    def dp_rank(self) -> int:
        """Which replica this rank belongs to."""
        return self.layout.dp_rank

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes the run's files."""
        return self.layout.is_writer

    def gather[Item](self, mine: Sequence[Item]) -> list[Item]:
        """The items of all replicas, in their order."""
        if self.dp_size == 1:
            return list(mine)
        parts: list[Any] = [None] * self.dp_size
        dist.all_gather_object(parts, list(mine), group=self.layout.groups.dp)
        return [item for part in parts for item in part]

    def logprobs(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Log-probs [B, S] of each microbatch's labels where it has weights; see `Policy`."""
        self.stepper.model.settle_parameters()
        return token_values(self.stepper, microbatches)

    def reference_logprobs(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """The same under the reference policy."""
        self.stepper.model.settle_parameters()
        with self._as_reference():
            return token_values(self.stepper, microbatches)

    def total(self, values: Tensor) -> Tensor:
        """Sum over the replicas of values of the ranks with the output layer, on every rank."""
        device = next(self.stepper.model.chunks[0].parameters()).device
        found = (
            values.to(device)
            if self.layout.is_last_stage
            else torch.zeros_like(values, device=device)
        )
        dist.all_reduce(found, group=self.layout.groups.dp)
        dist.all_reduce(found, group=self.layout.groups.pp)
        return found.to(values.device)

    def train(
        self, microbatches: Sequence[Microbatch], objective: PolicyObjective, *, num_samples: int
    ) -> Update:
        """One update; the learning-rate schedule moves on by so many samples."""
        result = self.stepper.forward_backward(to_device(microbatches), objective)
        changed = update(self.stepper.model, self.layout, num_samples=num_samples)
        return Update(
            loss=result.loss,
            statistics=result.statistics,
            num_trained=result.num_trained,
            num_positions=result.num_positions,
            grad_norm=changed.grad_norm,
            learning_rate=changed.learning_rate,
            skipped=changed.skipped,
            pipeline_sent_bytes=result.pipeline_sent_bytes,
        )

    def skip(self, *, num_samples: int) -> None:
        """No update, as there is nothing to train; only the schedule moves on."""
        skip_update(self.stepper.model, num_samples=num_samples)

    def _open_reference(self, is_new: bool) -> None:
        model, args = self.stepper.model, self._args
        model.settle_parameters()
        if is_new:
            self._reference = [value.detach().clone() for value in self._values()]
            if args.save:
                self._save_reference(Path(args.save))
            return
        folder = Path(args.load) / REFERENCE
        if not folder.is_dir():
            raise ValueError(
                f"--load {args.load} has no folder {REFERENCE}: the run that saved it had no "
                "reference policy. Go on with --kl-coefficient 0, or start a new run from its "
                "weights with --finetune."
            )
        kept = [value.detach().clone() for value in self._values()]
        load_weights(
            model.bare_chunks, self.layout, folder=folder, with_checksums=args.verify_checksums
        )
        self._reference = [value.detach().clone() for value in self._values()]
        with torch.no_grad():
            for value, old in zip(self._values(), kept, strict=True):
                value.copy_(old)

    def _save_reference(self, root: Path) -> None:
        """Keep the reference policy for a resumed run.

        Raises:
            OSError: it cannot be written; one message, on every rank.
        """
        try:
            chunks = self.stepper.model.bare_chunks
            save_weights(chunks, self.layout, folder=root / REFERENCE)
        except (OSError, CheckpointException) as error:
            on_writer(self.layout, lambda: clear_unfinished(root, REFERENCE))
            raise OSError(
                f"--save {root}: the weights of the reference policy could not be written to "
                f"{REFERENCE} ({free_space(root)} are free there); nothing is left of them. Make "
                "room, or choose another --save."
            ) from error

    def _values(self) -> list[Tensor]:
        """Everything of the chunks that a forward reads."""
        return [v for c in self.stepper.model.bare_chunks for v in (*c.parameters(), *c.buffers())]

    @contextmanager
    def _as_reference(self) -> Iterator[None]:
        """Run a block with the reference policy's weights; nothing is copied."""
        values = self._values()
        own = [value.data for value in values]
        for value, reference in zip(values, self._reference, strict=True):
            value.data = reference
        try:
            yield
        finally:
            for value, data in zip(values, own, strict=True):
                value.data = data
