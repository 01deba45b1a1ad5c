"""Packing that leaks is caught, and what it costs a model that has learned a little."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_ext.packing.batch import Sample
from megatron_ext.packing.leak import RIGHT, WRONG, packing_errors
from megatron_ext.packing.plan import plan_step
from megatron_ext.packing.types import Microbatch
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.microbatches import replica_of
from megatron_ext.upstream.step import Stepper
from megatron_ext.upstream.update import update
from tests.ranks import RankPool
from tests.upstream.jobs import build

LANGUAGES, WORDS, LONGEST, ROW = 4, 12, 20, 128
STEPS = 40
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 "
    f"--seq-length {ROW} --max-position-embeddings {ROW} --vocab-size {LANGUAGES + WORDS} "
    "--tokenizer-type NullTokenizer --swiglu --normalization RMSNorm --disable-bias-linear "
    "--attention-dropout 0 --hidden-dropout 0 --make-vocab-size-divisible-by 8 --packing "
    f"--train-iters {STEPS} --lr 1e-2 --lr-decay-style constant --global-batch-size 32 --seed 5"
).split()
LEARNED = ["--position-embedding-type", "learned_absolute"]
ROPE = ["--position-embedding-type", "rope"]
SP = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]


def sentences(count: int, *, seed: int) -> list[Sample]:
    """The first token names a language; each language follows a word by a word of its own."""
    following = torch.stack(
        [
            torch.randperm(WORDS, generator=torch.Generator().manual_seed(k))
            for k in range(LANGUAGES)
        ]
    )
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(count):
        language, word, length = (
            int(torch.randint(low, high, (1,), generator=generator))
            for low, high in ((0, LANGUAGES), (0, WORDS), (4, LONGEST))
        )
        words = [word]
        while len(words) < length:
            words.append(int(following[language, words[-1]]))
        tokens = torch.tensor([language, *(LANGUAGES + w for w in words)])
        samples.append(Sample(tokens=tokens, mask=torch.arange(len(tokens)) >= 2))
    return samples


def logprobs(stepper: Stepper, microbatch: Microbatch) -> Tensor:
    """Log-probabilities [B, S] of one microbatch on a rank without a pipeline."""
    kept = []

    def keep(logprobs_BS: Tensor, _: Microbatch) -> Tensor:
        kept.append(logprobs_BS)
        return logprobs_BS

    with torch.no_grad():
        stepper.forward_backward([microbatch], keep, forward_only=True)
    return kept[0]


def train_then_leak(flags: list[str]) -> tuple[list[float], dict[str, float]]:
    """Losses of the steps, then what leaking costs on new sentences."""
    with device_mode():
        options, layout, model, stepper = build([*TINY, *flags])
        losses = []
        for step in range(STEPS):
            plan = plan_step(
                sentences(32, seed=step),
                replace(options.packing, max_tokens_per_microbatch=1024),
                replica=replica_of(layout, options),
                seq_length=ROW,
                micro_batch_size=1,
            )
            losses.append(stepper.forward_backward(plan.microbatches).loss)
            update(model, layout, num_samples=32)
        errors = packing_errors(
            lambda microbatch: logprobs(stepper, microbatch),
            sentences(24, seed=STEPS),
            capacity=ROW,
            pad_to_multiple=replica_of(layout, options).sequence_multiple,
        )
        return losses, errors


@pytest.mark.parametrize(
    ("size", "flags"),
    [(1, LEARNED), pytest.param(2, [*ROPE, *SP], marks=pytest.mark.slow)],
    ids=["learned positions", "rotary positions, tp2 sp"],
)
@pytest.mark.slow
def test_leaky_packing_is_caught(ranks: RankPool, size: int, flags: list[str]) -> None:
    for losses, errors in ranks(size).run(train_then_leak, flags):
        print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
        for way, error in errors.items():
            print(f"{way:<34} max |packed - alone| on trained tokens: {error:.1e} nats")
        assert losses[-1] < 0.5 < losses[0]
        assert errors[RIGHT] < 1e-5
        assert min(errors[way] for way in WRONG) > 0.5
