"""Edge cases of a step: nothing to train, unequal work, lengths that do not divide."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_ext.packing.batch import Sample
from megatron_ext.packing.plan import ReplicaLayout, plan_step
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.layout import close_layout
from tests.ranks import RankPool
from tests.upstream.jobs import LLAMA, VOCAB_SIZE, build, fixed_batch, forward_backward

SP = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]


def sample(length: int, *, trained: bool, seed: int = 0) -> Sample:
    """A random sequence, trained wholly or not at all."""
    generator = torch.Generator().manual_seed(seed + 100 * length)
    tokens = torch.randint(0, VOCAB_SIZE, (length,), generator=generator)
    return Sample(tokens=tokens, mask=torch.full((length,), trained))


def run_batch(flags: list[str], batch: list[Sample]) -> tuple[float, float]:
    """Loss and gradient norm of one step over a batch."""
    with device_mode():
        options, _, model, stepper = build([*LLAMA, *flags])
        loss = forward_backward(options, stepper, batch)
        squares = [p.main_grad.square().sum() for c in model.chunks for p in c.parameters()]
        return loss, float(torch.stack(squares).sum().sqrt())


@pytest.mark.parametrize(("size", "flags"), [(1, []), (2, []), (2, SP)], ids=str)
def test_nothing_to_train_gives_zero_not_nan(ranks: RankPool, size: int, flags: list) -> None:
    """CASES A13: an all-masked batch has loss 0 and gradient 0, and no rank hangs."""
    batch = [sample(5, trained=False), sample(7, trained=False)]
    for loss, norm in ranks(size).run(run_batch, flags, batch):
        assert loss == 0.0
        assert norm == 0.0


def test_masked_microbatch_changes_nothing(ranks: RankPool) -> None:
    """CASES A13: a masked sequence beside a trained one neither adds loss nor weight."""
    [alone] = ranks(1).run(run_batch, [], [sample(9, trained=True)])
    both = [sample(9, trained=True), sample(6, trained=False)]
    [with_masked] = ranks(1).run(run_batch, [], both)
    for result in [with_masked, *ranks(2).run(run_batch, [], both)]:
        assert result[0] == pytest.approx(alone[0], abs=1e-6)
    assert with_masked[1] == pytest.approx(alone[1], rel=1e-6)


@pytest.mark.parametrize("packing", [[], ["--packing"]], ids=["padded", "packed"])
def test_lengths_that_tensor_parallelism_does_not_divide(ranks: RankPool, packing: list) -> None:
    """Odd lengths under sequence parallelism: padding is added and changes nothing."""
    batch = [sample(n, trained=True) for n in (3, 5, 7, 11)]
    [expected] = ranks(1).run(run_batch, [], batch)
    for loss, _ in ranks(2).run(run_batch, [*SP, *packing], batch):
        assert loss == pytest.approx(expected[0], abs=1e-6)


def test_initial_loss_is_that_of_guessing(ranks: RankPool) -> None:
    """Padded vocabulary columns take no part: an untrained model is near log of the real size."""
    flags = ["--init-method-std", "0.001"]
    [(loss, _)] = ranks(1).run(run_batch, flags, fixed_batch())
    assert loss == pytest.approx(math.log(VOCAB_SIZE), abs=0.02)


def test_every_rank_runs_a_legal_number_of_microbatches() -> None:
    """CASES A22: lengths [9,1,1,1,1,1], 9 tokens a row, 2 replicas, interleaved groups of 2."""
    from megatron_ext.packing.config import PackingConfig

    samples = [sample(n, trained=True, seed=i) for i, n in enumerate([9, 1, 1, 1, 1, 1])]
    config = PackingConfig(packing=True, max_tokens_per_microbatch=9)
    plans = [
        plan_step(
            samples,
            config,
            replica=ReplicaLayout(dp_size=2, dp_rank=rank, pipeline_size=2, group_size=2),
            seq_length=9,
            micro_batch_size=1,
        )
        for rank in range(2)
    ]
    counts = [len(plan.microbatches) for plan in plans]
    assert counts[0] == counts[1]
    assert counts[0] % 2 == 0
    assert sum(m.count for plan in plans for m in plan.microbatches) == 8


def raise_nan() -> str:
    """What a step says whose gradients are NaN."""
    with device_mode():
        options, _, model, stepper = build(LLAMA)
        with torch.no_grad():
            next(model.chunks[0].parameters()).fill_(math.nan)
        with pytest.raises(RuntimeError) as raised:
            forward_backward(options, stepper, fixed_batch())
        return str(raised.value)


def test_a_gradient_that_is_nan_ends_the_step_with_megatrons_message(ranks: RankPool):
    assert "found NaN in local grad norm" in ranks(1).run(raise_nan)[0]


def open_twice() -> list[int]:
    """Layouts of one process, one after the other."""
    found = []
    with device_mode():
        for flags in (["--tensor-model-parallel-size", "2"], []):
            found.append(build([*LLAMA, *flags])[1].tp_size)
            close_layout()
    return found


def test_a_process_can_open_layouts_one_after_the_other(ranks: RankPool):
    assert ranks(2).run(open_twice) == [[2, 1], [2, 1]]
