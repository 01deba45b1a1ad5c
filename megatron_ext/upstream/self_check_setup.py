"""What a self-check looks at: a model built as training builds it, and the ids it is given.

Legend: B rows, S positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Literal

import torch
from torch import Tensor

from megatron_ext.packing.batch import RowLayout, Sample, build_microbatch
from megatron_ext.packing.plan import StepPlan, plan_step
from megatron_ext.packing.types import Microbatch
from megatron_ext.upstream.arguments import Options
from megatron_ext.upstream.checkpoint_tensors import on_writer
from megatron_ext.upstream.evaluate import fill_model, logprobs_of
from megatron_ext.upstream.layout import Layout, open_layout
from megatron_ext.upstream.microbatches import replica_of
from megatron_ext.upstream.model import build_trainable
from megatron_ext.upstream.step import Stepper, build_stepper

_ROWS = 2
_LENGTHS = (0.9, 0.5, 0.3, 0.7, 0.2, 0.4)
"""Of the sequences that are packed, relative to a row."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """The outcome of one question; one that was not asked has no answer, so it is no pass."""

    name: str
    status: Literal["pass", "FAIL", "skipped"]
    number: str
    """What was measured; "-" = nothing was."""
    advice: str
    """What to do if it failed, or why it was skipped."""

    @property
    def passed(self) -> bool:
        """Whether it was asked, and answered as it should be."""
        return self.status == "pass"


def judged(name: str, *, passed: bool, number: str, advice: str) -> Line:
    """The line of a question that was asked."""
    return Line(name=name, status="pass" if passed else "FAIL", number=number, advice=advice)


def skipped(name: str, *, reason: str) -> Line:
    """The line of a question that was not asked."""
    return Line(name=name, status="skipped", number="-", advice=reason)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model on its layout, and what it is compared with."""

    options: Options
    layout: Layout
    stepper: Stepper
    reference: Path | None
    """Checkpoint that transformers loads; None = no comparison."""
    scratch: Path
    """New folder that all ranks see."""
    words: tuple[str, ...] = ()
    """The tool's file and flags, for its second run on one process."""

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.options.megatron.seq_length

    @property
    def is_half(self) -> bool:
        """Whether the model computes in bf16 or fp16."""
        return self.options.megatron.params_dtype != torch.float32

    @property
    def tolerance(self) -> float:
        """Nats that rounding may move a log-probability: in fp32 over tens of layers; in bf16 two
        of its steps at a logit of 16."""
        return 0.25 if self.is_half else 5e-4


def open_setup(
    options: Options, *, reference: Path | None, scratch_dir: Path, words: Sequence[str] = ()
) -> Setup:
    """Build the model as training does, fill it, and make the scratch folder.  Collective.

    Raises:
        ValueError: there is no such checkpoint, or it does not fit the flags.
    """
    layout = open_layout(options.megatron)
    model = build_trainable(options.megatron, layout)
    fill_model(options, layout, chunks=model.chunks)
    model.optimizer.reload_model_params()
    for chunk in model.chunks:
        chunk.eval()
    stepper = build_stepper(options, model=model, layout=layout)
    scratch = on_writer(layout, lambda: Path(mkdtemp(prefix="self-check-", dir=scratch_dir)))
    return Setup(
        options=options,
        layout=layout,
        stepper=stepper,
        reference=reference,
        scratch=scratch,
        words=tuple(words),
    )


def random_tokens(setup: Setup) -> Tensor:
    """Random ids, the same on every rank, [B, S]."""
    generator = torch.Generator().manual_seed(17)
    size = (_ROWS, setup.length)
    return torch.randint(0, setup.options.megatron.vocab_size, size, generator=generator)


def ragged_samples(setup: Setup) -> list[Sample]:
    """Sequences of different lengths from those ids; three of four tokens are trained."""
    ids = random_tokens(setup).flatten()
    samples = []
    for share in _LENGTHS:
        length = max(int(share * setup.length), 2)
        index = torch.arange(length)
        samples.append(Sample(tokens=ids[:length], mask=(index % 4 != 2) & (index > 0)))
        ids = ids.roll(-length)
    return samples


def plan_of(setup: Setup, samples: Sequence[Sample]) -> StepPlan:
    """This rank's microbatches of a step over the samples, normalised by its trained tokens."""
    config = replace(
        setup.options.packing,
        loss_normalization="global-token-mean",
        loss_denominator="counted",
        overlong="error",
    )
    return plan_step(
        samples,
        config,
        replica=replica_of(setup.layout, setup.options),
        seq_length=setup.length,
        micro_batch_size=1,
    )


def packed_row(setup: Setup, samples: list[Sample]) -> Microbatch:
    """The samples as one packed row of this layout, every masked token with weight 1."""
    multiple = replica_of(setup.layout, setup.options).sequence_multiple
    weights = [sample.mask.float() for sample in samples]
    layout = RowLayout(pad_to_multiple=multiple)
    count = sum(int(sample.mask.sum()) for sample in samples)
    return build_microbatch(samples, weights=weights, count=count, layout=layout)


def dense_logprobs(setup: Setup, tokens_BS: Tensor) -> Tensor:
    """log p(tokens[:, 1:]) of dense rows, [B, S - 1], on every rank."""
    mask = torch.arange(tokens_BS.shape[1]) > 0
    samples = [Sample(tokens=tokens_S, mask=mask) for tokens_S in tokens_BS]
    weights = [mask.float()] * len(samples)
    microbatch = build_microbatch(samples, weights=weights, count=0, layout=RowLayout(packed=False))
    return logprobs_of(setup.stepper, microbatch)[:, :-1]
