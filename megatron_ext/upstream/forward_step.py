"""What Megatron's schedules call for each microbatch, and what an objective is.

A plain objective is a function to per-token losses; one with statistics (`PolicyObjective`) also
says what else is averaged over the trained tokens, and whether it needs entropies.
Invariant the tests check: a statistic is its mean over the trained tokens of the step, whatever the
layout; no statistic changes a gradient.

Legend: B rows, S positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from megatron_ext.packing.types import Microbatch
from megatron_ext.rl.objective import PolicyObjective
from megatron_ext.rl.types import LossTerms
from megatron_ext.upstream.microbatches import packed_params, padding_mask
from megatron_ext.upstream.model import bare

if TYPE_CHECKING:
    from megatron_ext.upstream.step import Stepper

Objective = Callable[[Tensor, Microbatch], Tensor] | PolicyObjective
"""(log-probabilities [B, S] of the labels, microbatch) -> per-token losses [B, S], or loss terms.

Where the weight is 0 nothing is computed: the log-probability is 0, and the loss is left out,
whatever it or its derivative is."""
PipelineEvent = tuple[Literal["forward", "backward"], int, int]
"""(what, microbatch, model chunk) as executed on this rank."""


def cross_entropy(logprobs_BS: Tensor, _microbatch: Microbatch) -> Tensor:
    """Negative log-likelihood of the labels, the objective of supervised training."""
    return -logprobs_BS


def names_of_statistics(objective: Objective) -> tuple[str, ...]:
    """What a step reports beside the loss, in order."""
    return objective.statistics if isinstance(objective, PolicyObjective) else ()


class ForwardStep:
    """Megatron's ``forward_step_func``: one microbatch through one model chunk."""

    def __init__(
        self,
        stepper: Stepper,
        objective: Objective,
        on_event: Callable[[PipelineEvent], None] | None,
    ) -> None:
        self.stepper = stepper
        self.objective = objective
        self.needs_entropy = isinstance(objective, PolicyObjective) and objective.needs_entropy
        self.on_event = on_event

    def __call__(self, data: Iterator[tuple[int, Microbatch]], chunk: Any) -> tuple[Tensor, Any]:
        """The chunk's output, and the function that makes the last chunk's a loss."""
        index, microbatch = next(data)
        output = chunk(
            microbatch.tokens_BS,
            microbatch.positions_BS,
            None,
            labels=microbatch.labels_BS,
            packed_seq_params=packed_params(microbatch),
            padding_mask=padding_mask(microbatch, bare(chunk)),
            output_processor=partial(self._output, needed=microbatch.weights_BS != 0),
        )
        self._record(output, index, chunk)
        return output, lambda found: self._loss(found, microbatch)

    def _output(
        self,
        *,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None,
        labels: Tensor,
        needed: Tensor,
        **_: Any,
    ) -> Tensor:
        """Log-probabilities [B, S]; with the entropies, if needed, [2, B, S]."""
        logprobs_BS, entropy_BS = self.stepper.token_logprobs(
            hidden_states=hidden_states,
            output_layer=output_layer,
            output_weight=output_weight,
            labels=labels,
            needed=needed,
            with_entropy=self.needs_entropy,
        )
        return logprobs_BS if entropy_BS is None else torch.stack([logprobs_BS, entropy_BS])

    def _loss(self, found: Tensor, microbatch: Microbatch) -> tuple[Tensor, Tensor, Tensor]:
        """Sum of the weighted losses, count, and what is reported: that sum and the statistics'."""
        terms = self._terms(found, microbatch)
        weights_BS, is_trained_BS = microbatch.weights_BS, microbatch.weights_BS != 0
        losses_BS = terms.losses_BS
        weighted = torch.where(is_trained_BS, losses_BS * weights_BS, torch.zeros_like(losses_BS))
        count = torch.tensor(microbatch.count, dtype=torch.int, device=weighted.device)
        sums = [weighted.detach().double().sum()]
        for values_BS in terms.statistics.values():
            sums.append(torch.where(is_trained_BS, values_BS, 0).double().sum())
        return weighted.sum(), count, torch.stack(sums)

    def _terms(self, found: Tensor, microbatch: Microbatch) -> LossTerms:
        if not isinstance(self.objective, PolicyObjective):
            return LossTerms(losses_BS=self.objective(found, microbatch), statistics={})
        if self.needs_entropy:
            return self.objective(found[0], microbatch, entropy_BS=found[1])
        return self.objective(found, microbatch)

    def _record(self, output: Tensor, index: int, chunk: Any) -> None:
        if self.on_event is None:
            return
        number = self.stepper.model.chunks.index(chunk)
        on_event = self.on_event
        on_event(("forward", index, number))
        if output.requires_grad:
            output.register_hook(lambda _: on_event(("backward", index, number)))


class CountedFinalize:
    """Megatron's gradient finalisation that keeps the number it divided by."""

    def __init__(self) -> None:
        self.total: int | None = None

    def __call__(self, chunks: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
        """Finish the gradients of the chunks."""
        finalize_model_grads(chunks, num_tokens, **kwargs)
        assert num_tokens is not None, "--calculate-per-token-loss passes the count"
        self.total = int(num_tokens)
