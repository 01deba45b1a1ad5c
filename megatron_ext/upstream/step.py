"""One forward-backward over the microbatches of a step.

The only place that knows Megatron's loss scaling.  The loss of a step is (1/N) sum_t w_t l_t over
all tokens of all microbatches and ranks (docs/numerics.md): each microbatch returns the 3-tuple
(sum of weighted losses, integer count, report), Megatron adds counts and gradients over
microbatches and data-parallel ranks and divides once (``--calculate-per-token-loss``).
Invariant: the count Megatron divided by is the N of the microbatches, asserted in every step.

Legend: B rows, S positions, D model, T = B * S.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megatron_ext.logprobs.chunked import selected_logprobs
from megatron_ext.logprobs.vocab_parallel import LogProbs
from megatron_ext.packing.types import Microbatch
from megatron_ext.upstream.arguments import Options
from megatron_ext.upstream.forward_step import (
    CountedFinalize,
    ForwardStep,
    Objective,
    PipelineEvent,
    cross_entropy,
    names_of_statistics,
)
from megatron_ext.upstream.layout import Layout
from megatron_ext.upstream.model import TrainableModel
from megatron_ext.upstream.pipeline import CountingP2P, build_communicator

__all__ = ["Objective", "PipelineEvent", "StepResult", "Stepper", "build_stepper", "cross_entropy"]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step computed, the same on every rank."""

    loss: float
    """(1/N) sum w_t l_t over the whole job; 0 when N is 0."""
    count: int
    """N, the normaliser."""
    num_trained: int
    """Positions with a weight, over the whole job."""
    num_positions: int
    """Positions computed, padding included, over the whole job."""
    pipeline_sent_bytes: int = 0
    """Sent between stages, all stages and replicas of one tensor-parallel rank; 0 in one stage."""
    statistics: Mapping[str, float] = field(default_factory=dict)
    """Of the objective: means over the trained positions of the whole job."""


@dataclass(frozen=True, kw_only=True)
class Stepper:
    """Runs Megatron's pipeline schedules over our microbatches."""

    model: TrainableModel
    layout: Layout
    communicator: CountingP2P
    vocab_size: int
    """Real vocabulary; padding columns take no part in the softmax."""
    logprob_chunk_size: int = 1024
    temperature: float = 1.0

    def forward_backward(
        self,
        microbatches: Sequence[Microbatch],
        objective: Objective = cross_entropy,
        *,
        forward_only: bool = False,
        on_event: Callable[[PipelineEvent], None] | None = None,
    ) -> StepResult:
        """Gradients of the step's loss in Megatron's buffers.  Collective; see ``Objective``.

        Args:
            microbatches: this data-parallel rank's share; the same number on every rank.
        """
        self._check(microbatches)
        sums = self._sum_over_data(
            [
                sum(m.count for m in microbatches),
                sum(int((m.weights_BS != 0).sum()) for m in microbatches),
                sum(m.num_positions for m in microbatches),
                sum(int(m.padding_BS.sum()) for m in microbatches),
            ]
        )
        expected = sums[0]
        counted = CountedFinalize()
        self._prepare(microbatches, counted, forward_only=forward_only)
        self._scale_auxiliary_losses(expected, num_tokens=sums[2] - sums[3])
        run = get_forward_backward_func(
            pp_size=self.layout.pp_size,
            vp_size=self.layout.num_chunks if self.layout.num_chunks > 1 else None,
        )
        iterators = [enumerate(microbatches) for _ in self.model.chunks]
        rows, length = microbatches[0].tokens_BS.shape
        sent_before = self.communicator.traffic.sent_bytes
        reports = run(
            forward_step_func=ForwardStep(self, objective, on_event),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.model.chunks if len(iterators) > 1 else self.model.chunks[0],
            num_microbatches=len(microbatches),
            seq_length=length,
            micro_batch_size=rows,
            forward_only=forward_only,
            p2p_communicator=self.communicator,
            pg_collection=self.layout.groups,
        )
        if not forward_only:
            assert counted.total == expected, (
                f"Megatron divided the gradients by {counted.total}, but the microbatches count "
                f"{expected}"
            )
        names = names_of_statistics(objective)
        sent = self.communicator.traffic.sent_bytes - sent_before
        total, *statistics, sent = self._totals(reports, sent=sent, width=1 + len(names))
        means = [value / max(sums[1], 1) for value in statistics]
        return StepResult(
            loss=total / max(expected, 1),
            count=expected,
            num_trained=sums[1],
            num_positions=sums[2],
            pipeline_sent_bytes=int(sent),
            statistics=dict(zip(names, means, strict=True)),
        )

    def _check(self, microbatches: Sequence[Microbatch]) -> None:
        if not microbatches:
            raise ValueError("a step needs at least one microbatch on every rank; use a filler")
        tp = self.layout.tp_size
        for index, microbatch in enumerate(microbatches):
            length = microbatch.tokens_BS.shape[1]
            if self.layout.sequence_parallel and length % tp:
                raise ValueError(
                    f"microbatch {index} has {length} positions, not a multiple of "
                    f"--tensor-model-parallel-size {tp}: sequence parallelism splits them evenly. "
                    f"Pad it to {-(-length // tp) * tp}."
                )

    def _prepare(
        self, microbatches: Sequence[Microbatch], counted: CountedFinalize, *, forward_only: bool
    ) -> None:
        config = self.model.config
        config.finalize_model_grads_func = counted
        shapes = {tuple(m.tokens_BS.shape) for m in microbatches}
        config.variable_seq_lengths = len(shapes) > 1
        if forward_only:
            return
        for chunk in self.model.chunks:
            chunk.zero_grad_buffer()
        self.model.optimizer.zero_grad()

    def _scale_auxiliary_losses(self, count: int, *, num_tokens: int) -> None:
        """Make the sums that moe.py forms means over the step's real tokens: Megatron divides all
        gradients by the count."""
        model, share = self.model, count / max(num_tokens, 1)
        one = torch.ones(1, device=self._device())
        model.config.moe_grad_scale_func = lambda: model.optimizer.scale_loss(one) * share

    def _totals(self, reports: list[Tensor], *, sent: int, width: int) -> list[float]:
        """Sums of the reports over microbatches, and of `sent` over stages, both over
        data-parallel ranks, on every rank."""
        totals = torch.zeros(width + 1, dtype=torch.float64)
        totals[-1] = sent
        if self.layout.is_last_stage:
            totals[:-1] += torch.stack(reports).sum(dim=0).cpu()
        totals = totals.to(self._device())
        torch.distributed.all_reduce(totals, group=self.layout.dp_cp_group)
        torch.distributed.all_reduce(totals, group=self.layout.groups.pp)
        return totals.tolist()

    def _sum_over_data(self, values: list[int]) -> list[int]:
        tensor = torch.tensor(values, dtype=torch.int64, device=self._device())
        torch.distributed.all_reduce(tensor, group=self.layout.groups.dp)
        return tensor.tolist()

    def _device(self) -> torch.device:
        return next(self.model.chunks[0].parameters()).device

    def token_logprobs(
        self,
        *,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None,
        labels: Tensor,
        needed: Tensor | None = None,
        with_entropy: bool = False,
    ) -> LogProbs:
        """Log-probabilities (and entropies) [B, S] of ``labels`` [B, S] from hidden states
        [S(/t), B, D].

        needed: bool [B, S], the same on all tensor-parallel ranks; elsewhere values and gradients
        are 0.  None = all.
        """
        group = self.layout.groups.tp
        if self.layout.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=True, group=group
            )
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden_states, group=group)
        length, rows, _ = hidden.shape
        found = selected_logprobs(
            hidden.flatten(0, 1),
            output_layer.weight if output_weight is None else output_weight,
            labels.transpose(0, 1).reshape(-1),
            vocab_size=self.vocab_size,
            tp_group=group,
            temperature=self.temperature,
            chunk_size=self.logprob_chunk_size,
            with_entropy=with_entropy,
            needed_T=None if needed is None else needed.transpose(0, 1).reshape(-1),
            validate_labels=False,
        )
        laid = [
            None if x is None else x.view(length, rows).transpose(0, 1).contiguous() for x in found
        ]
        return LogProbs(*laid)  # type: ignore[arg-type]


def build_stepper(options: Options, *, model: TrainableModel, layout: Layout) -> Stepper:
    """The stepper that the options describe."""
    return Stepper(
        model=model,
        layout=layout,
        communicator=build_communicator(
            model.config,
            layout,
            scatter_gather=options.parallel.scatter_gather_pipeline_tensors,
        ),
        vocab_size=options.megatron.vocab_size,
        logprob_chunk_size=options.logprobs.logprob_chunk_size,
        temperature=options.training_temperature,
    )
