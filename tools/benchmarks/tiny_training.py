"""A small Llama on one process, to time training steps that differ only in their microbatches."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from megatron_ext.packing import PackingConfig, Sample
from megatron_ext.packing.plan import ReplicaLayout, StepPlan, plan_step
from megatron_ext.upstream.arguments import parse
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.layout import close_layout, open_layout
from megatron_ext.upstream.microbatches import to_device
from megatron_ext.upstream.model import build_trainable
from megatron_ext.upstream.step import Stepper, build_stepper
from megatron_ext.upstream.update import update
from pretrain_rl import quiet_libraries


def add_model_arguments(parser: ArgumentParser) -> None:
    """Sizes of the model."""
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=512)


def random_samples(lengths: Sequence[int], *, vocab_size: int, seed: int = 0) -> list[Sample]:
    """Sequences of these lengths; the last three quarters of each are trained."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Sample(
            tokens=torch.randint(vocab_size, (n,), generator=generator),
            mask=torch.arange(n) >= n // 4,
        )
        for n in lengths
    ]


@dataclass(frozen=True, kw_only=True)
class TinyTraining:
    """A model and its step."""

    stepper: Stepper
    packing: PackingConfig
    seq_length: int

    def plan(
        self, samples: Sequence[Sample], *, micro_batch_size: int = 1, **packing: object
    ) -> StepPlan:
        """Microbatches of one update; `packing`: fields of `PackingConfig`."""
        return plan_step(
            samples,
            replace(self.packing, **packing),
            replica=ReplicaLayout(),
            seq_length=self.seq_length,
            micro_batch_size=micro_batch_size,
        )

    def train(self, plan: StepPlan) -> float:
        """One update; its loss."""
        loss = self.stepper.forward_backward(to_device(plan.microbatches)).loss
        update(self.stepper.model, self.stepper.layout, num_samples=plan.num_samples)
        return loss


@contextmanager
def tiny_training(options: Namespace, *, seq_length: int) -> Iterator[TinyTraining]:
    """Build the model in a job of one process, and leave the job at the end."""
    flags = (
        f"--num-layers {options.num_layers} --hidden-size {options.hidden_size} "
        f"--vocab-size {options.vocab_size} --seq-length {seq_length} "
        "--num-attention-heads 4 --group-query-attention --num-query-groups 2 "
        "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
        "--attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer "
        "--train-iters 1000 --lr 1e-4 --lr-decay-style constant --global-batch-size 1"
    ).split()
    quiet_libraries()
    torch.set_num_threads(1)
    with device_mode():
        parsed = parse(flags)
        layout = open_layout(parsed.megatron)
        model = build_trainable(parsed.megatron, layout)
        yield TinyTraining(
            stepper=build_stepper(parsed, model=model, layout=layout),
            packing=parsed.packing,
            seq_length=seq_length,
        )
        close_layout()
