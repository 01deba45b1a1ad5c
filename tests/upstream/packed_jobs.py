"""What a rank does in the packing tests: one model, many steps, each against the plain reference.

The reference is a padded forward of the bare model on one process (`tests/references.py`).  Its
gradients are kept as whole tensors; every rank compares its own slices, so nothing is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from torch import Tensor

from megatron_ext.packing.batch import Sample, turn_ids_from_roles
from megatron_ext.packing.plan import StepPlan, plan_step
from megatron_ext.packing.weights import turns_from_mask
from megatron_ext.upstream.arguments import Options
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.microbatches import replica_of
from megatron_ext.upstream.model import TrainableModel
from megatron_ext.upstream.step import Stepper
from tests.references import normalized_loss, padded_token_losses
from tests.upstream.jobs import VOCAB_SIZE, build

LOSS = 1e-6
"""fp32 log-probabilities of a few nats, summed in float64.  Absolute, and relative to a loss above
1: a sum of many tokens' losses (token-sum, denominator one) has the sum of their errors."""
GRADIENT = 1e-5
"""Of a tensor's largest entry: fp32 sums of a few hundred terms in another order."""
MAX_LENGTH = 40
"""Of the sequences, and what `constant` divides by."""
TINY_LLAMA = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --group-query-attention "
    f"--num-query-groups 2 --ffn-hidden-size 48 --seq-length {MAX_LENGTH} "
    f"--vocab-size {VOCAB_SIZE} --make-vocab-size-divisible-by 8 --tokenizer-type NullTokenizer "
    "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--init-method-std 0.1 --train-iters 1 --lr 1e-3 --global-batch-size 12 --seed 5"
).split()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step: a loss normalisation and how the batch is laid out."""

    mode: str = "global-token-mean"
    packing: dict[str, Any] = field(default_factory=dict)
    """Fields of `PackingConfig`, without the mode."""
    micro_batch_size: int = 1
    rows: tuple[tuple[int, ...], ...] | None = None
    """Samples of each packed row, for the reference of row-mean."""

    @property
    def reference(self) -> tuple:
        """Cases with the same key have the same loss and gradients."""
        return self.mode, self.packing.get("loss_denominator", "counted"), self.rows


def conversations() -> list[Sample]:
    """Twelve ragged sequences of 1 to 40 tokens: multi-turn, one of them without a trained one."""
    generator = torch.Generator().manual_seed(7)
    spans = [
        [3, 4],
        [2, 5, 3, 6],
        [4, 1, 1, 2, 2, 9],
        [5, 0],
        [1, 12],
        [0, 3, 2, 1],
        [20, 20],
        [9, 2, 9, 2],
        [0, 1],
        [1, 1],
        [6, 3, 1, 8, 2, 4],
        [0, 2],
    ]
    samples = []
    for lengths in spans:
        turn_ids = turn_ids_from_roles(["user", "assistant"] * (len(lengths) // 2), lengths=lengths)
        tokens = torch.randint(VOCAB_SIZE, (sum(lengths),), generator=generator)
        samples.append(Sample(tokens=tokens, mask=turn_ids >= 0, turn_ids=turn_ids))
    return samples


def random_sample(mask: Sequence[bool], *, seed: int) -> Sample:
    """Random tokens under a mask, each run of trained tokens a turn."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB_SIZE, (len(mask),), generator=generator)
    trained = torch.tensor(mask)
    return Sample(tokens=tokens, mask=trained, turn_ids=turns_from_mask(trained))


def plan_case(
    options: Options, stepper: Stepper, samples: Sequence[Sample], case: Case
) -> StepPlan:
    """This rank's microbatches of a case."""
    return plan_step(
        samples,
        replace(
            options.packing,
            loss_normalization=case.mode,
            loss_normalization_max_length=MAX_LENGTH,
            **case.packing,
        ),
        replica=replica_of(stepper.layout, options),
        seq_length=options.megatron.seq_length,
        micro_batch_size=case.micro_batch_size,
        global_batch_size=len(samples),
    )


def plain_step(
    model: TrainableModel, samples: Sequence[Sample], case: Case
) -> tuple[float, list[Tensor]]:
    """Loss and every parameter's gradient from one padded forward of a model that is whole here."""
    [bare] = model.bare_chunks
    fixed = {"one": 1, "global-batch-size": len(samples)}
    default = len(samples) if case.mode == "token-sum" else None
    losses = padded_token_losses(lambda t, p: bare(t, p, None), samples, vocab_size=VOCAB_SIZE)
    loss = normalized_loss(
        [x.double() for x in losses],
        [s.mask for s in samples],
        mode=case.mode,
        turn_ids=[s.turn_ids for s in samples] if case.mode == "turn-mean" else None,
        rows=case.rows,
        max_length=MAX_LENGTH,
        denominator=fixed.get(case.packing.get("loss_denominator", "counted"), default),
    )
    return float(loss.detach()), list(torch.autograd.grad(loss, parameters_of(model)))


def parameters_of(model: TrainableModel) -> list[torch.nn.Parameter]:
    """Of all chunks, in the order that all lists of tensors here have."""
    return [p for chunk in model.bare_chunks for p in chunk.parameters()]


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A local tensor and its place in a whole one; both are Megatron's for checkpoints."""

    key: str
    whole_shape: tuple[int, ...]
    place: tuple[slice, ...]
    local: Tensor
    """A view of the parameter, or of a part of it."""


def slices_of(model: TrainableModel) -> Iterator[Slice]:
    """What this rank holds of the whole model; a whole tensor stacks the layers' parameters."""
    for chunk in model.bare_chunks:
        state = chunk.sharded_state_dict()
        apply_factories(state)
        for found in nested_values(state):
            if isinstance(found, ShardedTensor):
                sizes = (1,) * found.prepend_axis_num + found.local_shape
                place = zip(found.global_offset, sizes, strict=True)
                yield Slice(
                    key=found.key,
                    whole_shape=found.global_shape,
                    place=tuple(slice(start, start + size) for start, size in place),
                    local=found.data.view(sizes),
                )


@torch.no_grad()
def with_places(model: TrainableModel, values: Sequence[Tensor]) -> list[Slice]:
    """Slices of `values`, one for each parameter, where the parameters' would be."""
    parameters = parameters_of(model)
    own = [p.clone() for p in parameters]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
    found = [replace(x, local=x.local.clone()) for x in slices_of(model)]
    for parameter, value in zip(parameters, own, strict=True):
        parameter.copy_(value)
    return found


def whole_tensors(slices: Sequence[Slice]) -> dict[str, Tensor]:
    """Whole tensors by key, from the slices of a model that is whole on this rank."""
    wholes: dict[str, Tensor] = {}
    for x in slices:
        wholes.setdefault(x.key, torch.zeros(x.whole_shape))[x.place] = x.local.float()
    return wholes


def worst_difference(slices: Sequence[Slice], wholes: dict[str, Tensor]) -> tuple[float, str]:
    """Largest |mine - reference| relative to the largest entry of its whole tensor, and where."""
    worst = []
    for x in slices:
        difference = float((x.local - wholes[x.key][x.place]).abs().max())
        scale = float(wholes[x.key].abs().max())
        is_right = difference == 0.0
        worst.append((0.0 if is_right else difference / scale if scale else math.inf, x.key))
    return max(worst, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0])


def write_reference(flags: list[str], cases: Sequence[Case], file: Path, samples: list[Sample]):
    """One rank: random weights, norms included, and the plain result of every distinct case."""
    with device_mode():
        _, _, model, _ = build(flags)
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for parameter in parameters_of(model):
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
        results = {}
        for case in {case.reference: case for case in cases}.values():
            loss, gradients = plain_step(model, samples, case)
            results[case.reference] = loss, whole_tensors(with_places(model, gradients))
        weights = whole_tensors(with_places(model, parameters_of(model)))
        torch.save({"weights": weights, "results": results}, file)


def compare_drawn_steps(flags: list[str], *, num_examples: int) -> int:
    """Drawn lengths, masks and budgets on ranks that each hold a whole model; examples checked.

    Every rank draws the same; loss and gradients are held against the plain step right here.
    """
    done = []
    with device_mode():
        options, _, model, stepper = build(flags)

        @settings(max_examples=num_examples, deadline=None, derandomize=True, database=None)
        @given(st.lists(st.lists(st.booleans(), min_size=1, max_size=24), min_size=1), st.data())
        def check(masks: list[list[bool]], data: st.DataObject) -> None:
            samples = [random_sample(mask, seed=i) for i, mask in enumerate(masks)]
            packing = data.draw(st.booleans())
            budget = data.draw(st.integers(24, 80))
            multiple = data.draw(st.sampled_from(["global-token-mean", "sample-mean", "turn-mean"]))
            case = Case(
                mode=multiple, packing={"packing": packing, "max_tokens_per_microbatch": budget}
            )
            result = stepper.forward_backward(
                plan_case(options, stepper, samples, case).microbatches
            )
            loss, gradients = plain_step(model, samples, case)
            assert abs(result.loss - loss) < LOSS
            for parameter, gradient in zip(parameters_of(model), gradients, strict=True):
                worst = float((parameter.main_grad - gradient).abs().max())
                assert worst <= GRADIENT * float(gradient.abs().max())
            done.append(case)

        check()
    return len(done)


def compare_steps(
    flags: list[str], cases: Sequence[Case], file: Path, samples: list[Sample]
) -> list[dict[str, Any]]:
    """Every case on this layout: |loss - reference|, the worst gradient and its key."""
    reference = torch.load(file, weights_only=False)
    with device_mode():
        options, _, model, stepper = build(flags)
        with torch.no_grad():
            for x in slices_of(model):
                x.local.copy_(reference["weights"][x.key][x.place])
        found = []
        for case in cases:
            plan = plan_case(options, stepper, samples, case)
            result = stepper.forward_backward(plan.microbatches)
            loss, wholes = reference["results"][case.reference]
            gradients = with_places(model, [p.main_grad for p in parameters_of(model)])
            worst, key = worst_difference(gradients, wholes)
            found.append(
                {
                    "loss": abs(result.loss - loss) / max(1.0, abs(loss)),
                    "gradient": worst,
                    "key": key,
                    "microbatches": len(plan.microbatches),
                    "trained here": sum(int((m.weights_BS != 0).sum()) for m in plan.microbatches),
                }
            )
        return found
