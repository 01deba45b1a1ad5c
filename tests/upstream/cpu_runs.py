"""Small training runs that reach every row of the CPU table, and what of Megatron they execute."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType

from megatron_ext.upstream.checkpoint import Progress, resume, save
from megatron_ext.upstream.cpu import CPU_PATCHES, device_mode
from megatron_ext.upstream.update import update
from tests.upstream.jobs import build, fixed_batch, forward_backward

SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --swiglu "
    "--seq-length 24 --vocab-size 250 --tokenizer-type NullTokenizer "
    "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --train-iters 3 --lr 1e-3 --global-batch-size 4"
)
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
TP2 = "--tensor-model-parallel-size 2"
RUNS = {
    "distributed optimizer, bf16": (
        f"{SMALL} --attention-dropout 0.1 --hidden-dropout 0.1 --bf16 --use-distributed-optimizer "
        "--overlap-grad-reduce --overlap-param-gather --ckpt-fully-parallel-load"
    ),
    "interleaved pipeline, fp16, yarn": (
        f"{SMALL} {NO_DROPOUT} --num-layers 4 --pipeline-model-parallel-size 2 --fp16 "
        "--num-virtual-stages-per-pipeline-rank 2 --position-embedding-type yarn --loss-scale 64"
    ),
    "experts": (
        f"{SMALL} {NO_DROPOUT} --num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2 "
        "--moe-aux-loss-coeff 0.01 --moe-shared-expert-intermediate-size 16 "
        "--moe-shared-expert-overlap --moe-router-load-balancing-type aux_loss"
    ),
    "full recomputation of distributed activations": (
        f"{SMALL} --attention-dropout 0.1 --hidden-dropout 0.1 {TP2} --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1 --distribute-saved-activations"
    ),
    "sequence parallelism, selective recomputation": (
        f"{SMALL} {NO_DROPOUT} {TP2} --sequence-parallel --recompute-granularity selective "
        "--recompute-modules core_attn layernorm mlp"
    ),
}
"""Flags of runs on two ranks."""

Executed = set[tuple[str, str]]
"""(module without "megatron.", function) of Megatron, and ("", function) of our replacements."""


def train_save_resume(flags: str, folder: Path) -> tuple[list[float], Executed]:
    """Losses of two updates with a checkpoint between them; what of interest was executed."""
    with executed_functions() as executed, device_mode():
        options, layout, model, stepper = build([*flags.split(), "--save", str(folder)])
        args, batch, losses = options.megatron, fixed_batch()[:4], []
        for step in (1, 2):
            losses.append(forward_backward(options, stepper, batch))
            update(model, layout, num_samples=4)
            if step == 1:
                save(args, model, layout, progress=Progress(step=1, consumed_samples=4))
                args.load = args.save
                resume(args, model, layout)
    return losses, executed


@contextmanager
def executed_functions() -> Iterator[Executed]:
    """Collects Megatron's functions that name CUDA, and our replacements, as they start."""
    ours = {
        row.replacement.__code__: row.replacement.__qualname__
        for row in CPU_PATCHES
        if hasattr(row.replacement, "__code__")
    }
    found: Executed = set()

    def on_start(code: CodeType, _offset: int) -> object:
        if code in ours:
            found.add(("", ours[code]))
        elif "/megatron/" in code.co_filename and names_cuda(code):
            path = code.co_filename.rpartition("/megatron/")[2].removesuffix(".py")
            found.add((path.replace("/", "."), code.co_qualname))
        return sys.monitoring.DISABLE

    with monitoring(on_start):
        yield found


@contextmanager
def monitoring(on_start: Callable[[CodeType, int], object]) -> Iterator[None]:
    """Calls a function once for each function that starts in the block."""
    events, tool = sys.monitoring.events, sys.monitoring.PROFILER_ID
    sys.monitoring.use_tool_id(tool, "cpu_runs")
    sys.monitoring.register_callback(tool, events.PY_START, on_start)
    sys.monitoring.set_events(tool, events.PY_START)
    try:
        yield
    finally:
        sys.monitoring.set_events(tool, 0)
        sys.monitoring.free_tool_id(tool)


def names_cuda(code: CodeType) -> bool:
    """Whether a function's own code names CUDA, as an attribute or as a device."""
    texts = [constant for constant in code.co_consts if isinstance(constant, str)]
    starts = ("cuda:", "torch.cuda.")
    return "cuda" in code.co_names or any(t == "cuda" or t.startswith(starts) for t in texts)
