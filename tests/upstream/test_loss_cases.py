"""CASES.md through the real step: given token losses or logits in, the right loss out.

The objective replaces each token's loss by a given one, so what is tested is everything around it:
weights, counts, Megatron's scaling, the sums over microbatches and ranks.  A4 is cp = 1 only:
context parallelism needs Transformer Engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from megatron_ext.packing.batch import Sample, to_token_values
from megatron_ext.packing.plan import plan_step
from megatron_ext.packing.types import Microbatch
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.microbatches import packed_params, replica_of
from tests.ranks import RankPool
from tests.upstream.jobs import build

LENGTH = 12
TINY = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --group-query-attention "
    f"--num-query-groups 2 --ffn-hidden-size 16 --seq-length {LENGTH} "
    "--tokenizer-type NullTokenizer --position-embedding-type rope --swiglu "
    "--disable-bias-linear --attention-dropout 0 --hidden-dropout 0 "
    "--untie-embeddings-and-output-weights --make-vocab-size-divisible-by 8 "
    "--train-iters 1 --lr 1e-3 --global-batch-size 4 --seed 5"
).split()
SP = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
LAYOUTS = {"one": (1, []), "two replicas": (2, []), "tp2 sp": (2, SP)}
PACKINGS: dict[str, tuple[int, dict[str, object]]] = {
    "padded": (1, {}),
    "padded together": (2, {}),
    "packed": (1, {"packing": True}),
    "packed apart": (1, {"packing": True, "max_tokens_per_microbatch": 5}),
    "packed full rows": (1, {"packing": True, "pad_rows_to_capacity": True}),
}
"""Sequences of a padded microbatch, and other options."""


def given(losses: Sequence[float], mask: Sequence[int]) -> Sample:
    """A sequence with these losses for its tokens after a prompt of one."""
    return Sample(
        tokens=torch.arange(1 + len(losses)),
        mask=torch.tensor([0, *mask]) != 0,
        extras={"loss": torch.tensor([0, *losses], dtype=torch.float32)},
    )


ONES = [given([1] * 4, [1] * 4), given([1] * 2, [1] * 2)]
BATCHES: dict[str, tuple[list[Sample], dict[str, object]]] = {
    "a1": ([given([2, 2, 2, 2], [1] * 4), given([8], [1])], {}),
    "a4": ([given([1] * 4, [1] * 4)], {}),
    "a8": (ONES, {"loss_normalization": "constant", "loss_normalization_max_length": 8}),
    "a10": ([given([3, 50], [1, 0]), given([5, -20], [1, 0])], {}),
    "a10 other": ([given([3, 0], [1, 0]), given([5, 1e4], [1, 0])], {}),
    "a10 not finite": ([given([3, math.inf], [1, 0]), given([5, math.nan], [1, 0])], {}),
    "a13 one": ([given([3, 5], [1, 1]), given([7, 9], [0, 0])], {}),
    "a13 all": ([given([7, 9], [0, 0])] * 2, {}),
}


@dataclass(frozen=True, kw_only=True)
class Found:
    """The step's loss, and this rank's gradients in one vector."""

    loss: float
    gradient: Tensor


def run_batches(flags: list[str]) -> dict[tuple[str, str], Found]:
    """Every batch in every packing, by their names."""
    with device_mode():
        options, layout, model, stepper = build([*TINY, "--vocab-size", "7", *flags])
        parameters = [p for chunk in model.chunks for p in chunk.parameters()]
        found = {}
        for name, (samples, normalization) in BATCHES.items():
            for packing_name, (micro_batch_size, packing) in PACKINGS.items():
                plan = plan_step(
                    samples,
                    replace(options.packing, **normalization, **packing),
                    replica=replica_of(layout, options),
                    seq_length=LENGTH,
                    micro_batch_size=micro_batch_size,
                )
                loss = stepper.forward_backward(plan.microbatches, given_losses).loss
                gradient = torch.cat([p.main_grad.flatten() for p in parameters])
                found[name, packing_name] = Found(loss=loss, gradient=gradient)
        return found


def given_losses(logprobs_BS: Tensor, microbatch: Microbatch) -> Tensor:
    """The loss in the extras; its derivative is the loss itself."""
    return microbatch.extras["loss"] * (1 + logprobs_BS - logprobs_BS.detach())


@pytest.fixture(scope="module", params=LAYOUTS)
def found(ranks: RankPool, request: pytest.FixtureRequest) -> dict[tuple[str, str], list[Found]]:
    """What every rank of a layout found, by batch and packing."""
    size, flags = LAYOUTS[request.param]
    results = ranks(size).run(run_batches, flags)
    return {key: [result[key] for result in results] for key in results[0]}


def losses_of(found: dict, name: str) -> list[float]:
    return [of_rank.loss for packing in PACKINGS for of_rank in found[name, packing]]


def test_case_a1_the_mean_is_over_all_tokens(found: dict) -> None:
    """3.2 for two microbatches, one microbatch or one row, and on one or two replicas."""
    assert losses_of(found, "a1") == pytest.approx([3.2] * len(losses_of(found, "a1")), abs=1e-6)


def test_case_a4_four_losses_of_one(found: dict) -> None:
    assert set(losses_of(found, "a4")) == {1.0}


def test_case_a8_constant_length(found: dict) -> None:
    assert set(losses_of(found, "a8")) == {0.375}


@pytest.mark.parametrize("name", ["a10 other", "a10 not finite"])
def test_case_a10_masked_places_take_no_part(found: dict, name: str) -> None:
    """No bit of the gradient depends on them, also where they are not finite."""
    assert set(losses_of(found, "a10")) == set(losses_of(found, name)) == {4.0}
    for packing in PACKINGS:
        for one, other in zip(found["a10", packing], found[name, packing], strict=True):
            assert one.gradient.isfinite().all()
            assert one.gradient.any()
            assert torch.equal(one.gradient, other.gradient)


def test_case_a13_a_microbatch_with_nothing_to_train(found: dict) -> None:
    assert set(losses_of(found, "a13 one")) == {4.0}
    assert set(losses_of(found, "a13 all")) == {0.0}
    for packing in PACKINGS:
        assert not any(of_rank.gradient.any() for of_rank in found["a13 all", packing])


def run_constant_logits(flags: list[str]) -> dict[str, float]:
    """The step's loss for token 0 where every position has the case's logits, padding columns 9."""
    cases = {"e1": ([1, 0, 0, 0, 0], 1.0), "b13": ([2, 0, -1], 0.5)}
    with device_mode():
        options, layout, model, stepper = build([*TINY, "--vocab-size", "5", *flags])
        [bare] = model.bare_chunks
        sample = Sample(tokens=torch.zeros(4, dtype=torch.long), mask=torch.ones(4).bool())
        plan = plan_step(
            [sample],
            options.packing,
            replica=replica_of(layout, options),
            seq_length=LENGTH,
            micro_batch_size=1,
        )
        losses = {}
        for name, (logits, temperature) in cases.items():
            rows = torch.zeros(8, 16)
            rows[:, 0] = torch.tensor([*logits, *[9] * (8 - len(logits))])
            with torch.no_grad():
                bare.decoder.final_layernorm.weight.zero_()
                bare.decoder.final_layernorm.bias.copy_(torch.eye(16)[0])
                bare.output_layer.weight.copy_(rows.chunk(layout.tp_size)[layout.groups.tp.rank()])
            changed = replace(stepper, vocab_size=len(logits), temperature=temperature)
            losses[name] = changed.forward_backward(plan.microbatches).loss
        return losses


@pytest.mark.parametrize(("size", "flags"), [(1, []), (2, SP)], ids=["one", "tp2 sp"])
def test_cases_e1_and_b13_padding_columns_and_temperature(
    ranks: RankPool, size: int, flags: list
) -> None:
    for losses in ranks(size).run(run_constant_logits, flags):
        assert losses["e1"] == pytest.approx(0.904832, abs=5e-7)
        assert losses["b13"] == pytest.approx(0.020581, abs=5e-7)


def run_neighbours(flags: list[str]) -> tuple[list[Tensor], list[Tensor]]:
    """Logits and log-probabilities of A and B for two rows that differ in one token of A."""
    with device_mode():
        options, layout, model, stepper = build(
            [*TINY, "--vocab-size", "250", "--packing", "--init-method-std", "0.2", *flags]
        )
        [bare] = model.bare_chunks
        first, second = torch.arange(1, 8), torch.arange(9, 14)
        changed = first.clone()
        changed[2] = 99
        logits, logprobs = [], []
        for a in (first, changed):
            samples = [Sample(tokens=x, mask=torch.ones(len(x)).bool()) for x in (a, second)]
            [microbatch] = plan_step(
                samples,
                options.packing,
                replica=replica_of(layout, options),
                seq_length=LENGTH,
                micro_batch_size=1,
            ).microbatches
            with torch.no_grad():
                logits.append(
                    bare(
                        microbatch.tokens_BS,
                        microbatch.positions_BS,
                        None,
                        packed_seq_params=packed_params(microbatch),
                    )[0]
                )
            keep: list[Tensor] = []
            stepper.forward_backward(
                [microbatch], lambda found, _, keep=keep: keep.append(found.detach()) or -found
            )
            logprobs.append(torch.cat(to_token_values(keep[0], lengths=[7, 5])))
        return logits, logprobs


@pytest.mark.parametrize(
    ("size", "flags"),
    [(1, []), (2, SP), (2, [*SP, "--bf16"])],
    ids=["one", "tp2 sp", "tp2 sp bf16"],
)
def test_case_d9_a_neighbour_changes_no_bit(ranks: RankPool, size: int, flags: list) -> None:
    """Through the whole GPT model and the step: B beside another A is bit-equal."""
    for logits, logprobs in ranks(size).run(run_neighbours, flags):
        assert torch.equal(logits[0][7:12], logits[1][7:12])
        assert not torch.equal(logits[0][2:7], logits[1][2:7])
        assert torch.equal(logits[0][:2], logits[1][:2])
        assert torch.equal(logprobs[0][7:], logprobs[1][7:])
        assert not torch.equal(logprobs[0][:7], logprobs[1][:7])
