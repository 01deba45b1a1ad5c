"""The torch namespace of CPU mode: torch itself, but for the names it replaces."""

from __future__ import annotations

import ast
import logging
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput, CudaRNGStatesTracker
from torch import Tensor
from torch.testing import assert_close

from megatron_ext.upstream.cpu import CPU_PATCHES, device_mode
from megatron_ext.upstream.cuda_on_cpu import CONSTRUCTORS, torch_on_cpu
from tests.ranks import RankPool

CPU = torch.device("cpu")
HARMLESS = {"CUDAGraph", "amp", "is_available", "nvtx"}
"""Names of torch.cuda that work without a GPU."""
NEVER_RUN = {
    "default_generators": "graph-safe random states, and a function that is replaced",
    "get_device_capability": "NCCL expert parallelism",
    "is_current_stream_capturing": "NCCL expert parallelism",
    "device_memory_used": "report_memory of Megatron's own loop",
    "clock_rate": "StragglerDetector",
    "power_draw": "StragglerDetector",
    "temperature": "StragglerDetector",
    "utilization": "StragglerDetector",
}
"""Names of torch.cuda in code of the patched modules that CPU runs never enter."""


@pytest.mark.parametrize(
    ("ours", "theirs", "replaced"),
    [
        (torch_on_cpu, torch, {"cuda", "device", "distributed", *CONSTRUCTORS}),
        (torch_on_cpu.distributed, torch.distributed, {"all_gather"}),
    ],
    ids=["torch", "torch.distributed"],
)
def test_other_names_are_those_of_torch(ours: ModuleType, theirs: ModuleType, replaced: set[str]):
    own = {"__name__", "__doc__", "__package__", "__loader__", "__spec__", "__getattr__"}
    different = {n for n, value in vars(theirs).items() if getattr(ours, n) is not value}
    assert different - own == replaced
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ours.no_such_name


def patched_modules() -> list[ast.Module]:
    """The source of Megatron's modules that get the namespace."""
    root = Path(tensor_parallel.__file__).parents[2]
    names = [
        row.target.removeprefix("megatron.").removesuffix(":torch")
        for row in CPU_PATCHES
        if row.replacement is torch_on_cpu
    ]
    return [ast.parse((root / f"{name.replace('.', '/')}.py").read_text()) for name in names]


def test_every_cuda_name_of_the_patched_modules_has_an_answer():
    used, constructors = set(), set()
    for node in (node for tree in patched_modules() for node in ast.walk(tree)):
        match node:
            case ast.Attribute(ast.Attribute(ast.Name("torch"), "cuda"), name):
                used.add(name)
            case ast.Call(ast.Attribute(ast.Name("torch"), name), keywords=keywords):
                if any(keyword.arg == "device" for keyword in keywords):
                    constructors.add(name)
    answered = {
        name
        for name, value in vars(torch_on_cpu.cuda).items()
        if name[:2] != "__" and value is not getattr(torch.cuda, name, None)
    }
    assert used == answered | HARMLESS | NEVER_RUN.keys()
    assert constructors == set(CONSTRUCTORS)


@pytest.mark.parametrize("device", ["cuda", "cuda:1", 0, torch.device("cuda", 1), "cpu", None])
def test_a_tensor_for_cuda_is_one_of_the_cpu(device: object):
    like = torch.ones(2)
    made = [
        torch_on_cpu.zeros(2, 3, device=device, pin_memory=True),
        torch_on_cpu.tensor([1, 2], device=device),
        torch_on_cpu.empty_like(like, device=device),
        torch_on_cpu.arange(3, device=device),
        torch_on_cpu.full((2,), 7.0, dtype=torch.float64, device=device),
    ]
    assert all(type(x) is Tensor and x.device == CPU and not x.is_pinned() for x in made)
    assert torch.equal(made[3], torch.arange(3))


def test_a_meta_tensor_stays_one():
    assert torch_on_cpu.zeros(2, device="meta").device.type == "meta"
    with torch_on_cpu.device("meta"):
        assert torch_on_cpu.zeros(2).device.type == "meta"


def test_a_cuda_device_is_the_cpu_and_all_are_devices():
    device = torch_on_cpu.device
    cuda = [device("cuda"), device("cuda:3"), device("cuda", 1), device(type="cuda"), device(0)]
    cuda += [device("cuda", torch_on_cpu.cuda.current_device())]
    assert all(d == CPU and type(d) is torch.device for d in cuda)
    assert device("meta") == torch.device("meta")
    assert all(isinstance(d, device) for d in (CPU, torch.device("cuda"), device("cuda")))
    assert not isinstance("cpu", device)
    assert isinstance(torch.ones(1), torch_on_cpu.Tensor)


def test_streams_and_events_have_nothing_to_wait_for():
    cuda = torch_on_cpu.cuda
    stream, event = cuda.Stream(priority=-1), cuda.Event(enable_timing=True)
    with cuda.stream(stream):
        event.record(stream)
        stream.wait_event(stream.record_event(event))
    cuda.current_stream().wait_stream(stream)
    event.wait()
    event.synchronize()
    stream.synchronize()
    cuda.synchronize()
    assert event.query()
    assert cuda.max_memory_allocated() > 2**20


def gathered(shapes: list[tuple[int, ...]], *, async_op: bool) -> list[Tensor]:
    """What every rank has after `all_gather` of each rank's own tensor."""
    mine = torch.full(shapes[dist.get_rank()], float(dist.get_rank() + 1))
    outputs = [torch.zeros(shape) for shape in shapes]
    work = torch_on_cpu.distributed.all_gather(outputs, mine, async_op=async_op)
    if async_op:
        assert work.wait()
        assert work.is_completed()
    return outputs


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize(
    "shapes", [[(3, 2), (3, 2)], [(3, 2), (1, 2)], [(0, 4), (2, 4)], [(2, 3), (3, 2)]], ids=str
)
def test_unequal_tensors_are_gathered(ranks: RankPool, shapes, async_op: bool):
    expected = [torch.full(shape, float(rank + 1)) for rank, shape in enumerate(shapes)]
    assert_close(ranks(2).run(gathered, shapes, async_op=async_op), [expected, expected])


@pytest.fixture
def tracker(caplog: pytest.LogCaptureFixture):
    """Megatron's tracker of random states with two streams, in CPU mode."""
    with device_mode(has_cuda=False), torch.random.fork_rng([]), caplog.at_level(logging.WARNING):
        torch.manual_seed(5)
        tracker = CudaRNGStatesTracker()
        tracker.add("one", 11)
        tracker.add("two", 12)
        yield tracker
    assert not caplog.records  # Megatron warns of each fork that the CPU's generator moved


def stream_of(seed: int, count: int) -> list[float]:
    """The first numbers after seeding."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand((), generator=generator).item() for _ in range(count)]


def draw() -> float:
    """A number of the default generator."""
    return torch.rand(()).item()


def test_a_fork_moves_only_its_own_stream(tracker: CudaRNGStatesTracker):
    seen: dict[str, list[float]] = {"default": [draw()], "one": [], "two": []}
    for name in ("one", "two", "one"):
        with tracker.fork(name):
            seen[name].append(draw())
        seen["default"].append(draw())
    assert seen["default"] == stream_of(5, 4)
    assert seen["one"] == stream_of(11, 2)
    assert seen["two"] == stream_of(12, 1)


def test_forks_can_be_nested_and_left_by_an_exception(tracker: CudaRNGStatesTracker):
    one, two = stream_of(11, 3), stream_of(12, 2)
    with tracker.fork("one"):
        assert draw() == one[0]
        with pytest.raises(KeyError), tracker.fork("two"):
            assert draw() == two[0]
            raise KeyError
        assert draw() == one[1]
        with tracker.fork("one"):
            assert draw() == one[2]
    with tracker.fork("two"):
        assert draw() == two[1]
    assert draw() == stream_of(5, 1)[0]


def test_states_are_saved_and_set(tracker: CudaRNGStatesTracker):
    states = tracker.get_states()
    with tracker.fork("one"):
        first = draw()
    tracker.set_states(states)
    with tracker.fork("one"):
        assert draw() == first


def recomputed(*, keeps_output: bool) -> list[Tensor]:
    """Gradients of dropout, split and product, with the dropout's output thrown away or kept."""
    with device_mode():
        tensor_parallel.get_cuda_rng_tracker().add("one", 11)
        torch.manual_seed(3)
        x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)

        def dropped(value: Tensor) -> Tensor:
            with tensor_parallel.get_cuda_rng_tracker().fork("one"):
                return torch.nn.functional.dropout(value.exp(), 0.5)

        checkpoint = CheckpointWithoutOutput()
        y = dropped(x) if keeps_output else checkpoint.checkpoint(dropped, x)
        left, right = y.split(3, dim=1)  # views of the output see it recomputed as well
        z = (left @ weight) * right
        if not keeps_output:
            checkpoint.discard_output_and_register_recompute(z)
            assert y.untyped_storage().size() == 0
        z.sum().backward()
        return [x.grad, weight.grad]


def test_a_discarded_output_is_recomputed(ranks: RankPool):
    kept, discarded = (ranks(1).run(recomputed, keeps_output=keeps)[0] for keeps in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(kept, discarded, strict=True))
    assert kept[0].abs().sum() > 0
