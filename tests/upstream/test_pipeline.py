"""What the pipeline executes and sends, against the schedule as data and Megatron's table."""

from __future__ import annotations

import pytest
from megatron.core.pipeline_parallel.schedules import get_schedule_table

from megatron_ext.packing.plan import plan_step
from megatron_ext.parallel.schedule import chunk_order, schedule
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.microbatches import replica_of
from tests.ranks import RankPool
from tests.upstream.jobs import DEEP, build, fixed_batch


def run_step(flags: list[str], num_samples: int) -> dict[str, object]:
    """One forward-backward; the events this rank executed and the bytes it sent."""
    events: list[tuple[str, int, int]] = []
    with device_mode():
        options, layout, _, stepper = build([*DEEP, *flags])
        plan = plan_step(
            fixed_batch()[:num_samples],
            options.packing,
            replica=replica_of(layout, options),
            seq_length=24,
            micro_batch_size=1,
        )
        result = stepper.forward_backward(plan.microbatches, on_event=events.append)
        return {
            "events": events,
            "rank": layout.groups.pp.rank(),
            "chunks": layout.num_chunks,
            "num_microbatches": len(plan.microbatches),
            "sent_bytes": stepper.communicator.traffic.sent_bytes,
            "reported_bytes": result.pipeline_sent_bytes,
        }


@pytest.mark.parametrize(
    ("size", "v", "samples"), [(2, 1, 5), (4, 1, 6), (2, 2, 6), (4, 2, 8)], ids=str
)
def test_executed_order_is_the_schedule(ranks: RankPool, size: int, v: int, samples: int) -> None:
    flags = f"--pipeline-model-parallel-size {size}".split()
    if v > 1:
        flags += ["--num-virtual-stages-per-pipeline-rank", str(v)]
    for result in ranks(size).run(run_step, flags, samples):
        expected = schedule(p=size, rank=result["rank"], m=result["num_microbatches"], v=v)
        assert result["events"] == expected


@pytest.mark.parametrize(("m", "v", "g"), [(8, 2, 4), (6, 3, 2), (10, 2, 4), (4, 2, 4)])
def test_chunk_order_is_megatrons_table(m: int, v: int, g: int) -> None:
    assert chunk_order(m, v=v, g=g) == get_schedule_table(m, v, g)


@pytest.mark.parametrize("virtual", ["", "--num-virtual-stages-per-pipeline-rank 2"])
def test_scatter_gather_sends_one_over_t(ranks: RankPool, virtual: str) -> None:
    base = f"--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 {virtual}".split()
    plain = ranks(4).run(run_step, base, 4)
    scattered = ranks(4).run(run_step, [*base, "--scatter-gather-pipeline-tensors"], 4)
    assert plain[0]["reported_bytes"] == sum(result["sent_bytes"] for result in plain) // 2
    for before, after in zip(plain, scattered, strict=True):
        assert before["sent_bytes"] > 0
        assert 2 * after["sent_bytes"] == before["sent_bytes"]
        assert 2 * after["reported_bytes"] == before["reported_bytes"]
        assert before["events"] == after["events"]
