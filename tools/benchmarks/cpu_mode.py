"""`cpu-mode`: what CPU mode costs on a training step of a tiny model.

Part of a step runs without CPU mode too: forward and backward of a model chunk without rotary
positions, built in CPU mode.  The very same modules are timed in turns inside and outside of it, in
CPU seconds of one process with one thread.  The rest (buffers, optimizer) cannot run without it, so
for a whole step the calls of CPU mode's functions are counted and taken at what one costs more than
the function of torch it stands for.
"""

from __future__ import annotations

import contextlib
import io
import os
import statistics
import sys
import time
import timeit
from argparse import ArgumentParser, Namespace
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_ext.packing.types import Microbatch
from megatron_ext.upstream import cuda_on_cpu
from megatron_ext.upstream.arguments import parse
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.layout import close_layout, open_layout
from megatron_ext.upstream.model import build_trainable
from megatron_ext.upstream.step import build_stepper
from pretrain_rl import quiet_libraries
from tools.benchmarks.tiny_training import TinyTraining, add_model_arguments, random_samples


def add_arguments(parser: ArgumentParser) -> None:
    """Options of the subcommand."""
    add_model_arguments(parser)
    parser.add_argument("--seq-length", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=30)
    parser.set_defaults(num_layers=2, hidden_size=64, vocab_size=257)


def run(options: Namespace) -> dict[str, object]:
    """CPU seconds with and without, the ratio's quartiles, and the share of a whole step."""
    lengths = [options.seq_length] * options.microbatches
    samples = random_samples(lengths, vocab_size=options.vocab_size)
    with device_mode():
        with contextlib.redirect_stdout(io.StringIO()):  # what Megatron prints of the model
            training = build_tiny_training(options)
        plan = training.plan(samples)
        training.train(plan)
        step_seconds = min(seconds_of(lambda: training.train(plan)) for _ in range(5))
        calls = calls_of_cpu_mode(lambda: training.train(plan))
    [chunk] = training.stepper.model.bare_chunks

    def forward_backward() -> None:
        for microbatch in plan.microbatches:
            token_losses(chunk, microbatch).mean().backward()

    without, within = [], []
    with torch.compiler.set_stance("force_eager"):  # in both: CPU mode does not compile
        forward_backward()
        for _ in range(options.rounds):
            without.append(seconds_of(forward_backward))
            with device_mode():
                within.append(seconds_of(forward_backward))
    close_layout()
    ratios = [b / a for a, b in zip(without, within, strict=True)]
    extra = extra_seconds_of_a_call()
    return {
        "forward_backward_seconds": {
            "without": statistics.median(without),
            "cpu_mode": statistics.median(within),
        },
        "ratio_quartiles": [round(x, 4) for x in statistics.quantiles(ratios, n=4)],
        "ratio": statistics.median(ratios),
        "whole_step_seconds": step_seconds,
        "whole_step_calls": calls,
        "seconds_a_call": extra,
        "whole_step_share": calls * extra / step_seconds,
    }


def build_tiny_training(options: Namespace) -> TinyTraining:
    """A Llama but for learned positions, in a job of one process."""
    flags = (
        f"--num-layers {options.num_layers} --hidden-size {options.hidden_size} "
        f"--vocab-size {options.vocab_size} --seq-length {options.seq_length} "
        "--num-attention-heads 4 --group-query-attention --num-query-groups 2 --swiglu "
        "--normalization RMSNorm --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 "
        "--tokenizer-type NullTokenizer --train-iters 1000 --lr 1e-4 --use-distributed-optimizer"
    ).split()
    quiet_libraries()
    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    store = dist.HashStore()  # type: ignore[reportPrivateImportUsage]  # documented there
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    parsed = parse(flags)
    layout = open_layout(parsed.megatron)
    model = build_trainable(parsed.megatron, layout)
    return TinyTraining(
        stepper=build_stepper(parsed, model=model, layout=layout),
        packing=parsed.packing,
        seq_length=options.seq_length,
    )


def token_losses(chunk: torch.nn.Module, microbatch: Microbatch) -> torch.Tensor:
    """Megatron's own cross-entropy of every token."""
    return chunk(microbatch.tokens_BS, microbatch.positions_BS, None, labels=microbatch.labels_BS)


def seconds_of(work: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    started = time.process_time()
    work()
    return time.process_time() - started


def calls_of_cpu_mode(work: Callable[[], object]) -> int:
    """How often a function of the CPU namespace starts in ``work``."""
    monitoring, tool, count = sys.monitoring, sys.monitoring.PROFILER_ID, 0

    def on_start(code: object, _offset: int) -> object:
        nonlocal count
        if code.co_filename != cuda_on_cpu.__file__:  # type: ignore[attr-defined]
            return monitoring.DISABLE
        count += 1
        return None

    monitoring.use_tool_id(tool, "cpu-mode")
    monitoring.register_callback(tool, monitoring.events.PY_START, on_start)
    monitoring.set_events(tool, monitoring.events.PY_START)
    try:
        work()
    finally:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)
    return count


def extra_seconds_of_a_call(repeats: int = 5_000, rounds: int = 20) -> float:
    """What the dearest kind of call, a constructor with a device, costs more than torch's own."""
    ours, theirs = cuda_on_cpu.torch_on_cpu.zeros, torch.zeros
    timers = [
        timeit.Timer(lambda: ours(1, device="cuda"), timer=time.process_time),
        timeit.Timer(lambda: theirs(1, device="cpu"), timer=time.process_time),
    ]
    pairs = [[timer.timeit(repeats) for timer in timers] for _ in range(rounds)]
    return statistics.median(within - without for within, without in pairs) / repeats
