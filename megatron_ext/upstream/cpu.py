"""CPU mode: unmodified Megatron trains on CPU and gloo by the code that runs on GPU and NCCL.

Without CUDA, ``device_mode()`` gives each Megatron module that needs CUDA a ``torch`` whose CUDA is
the CPU (``cuda_on_cpu``), and replaces the few functions that need more than that.  With CUDA it
changes nothing.  Invariants the tests check: after the context every patched attribute is the
object it was before; every row is used by some run of the tests, and what these run of Megatron
that names CUDA is in a row or known to do without.
Not covered: CUDA graphs, FSDP, FP8, Transformer Engine, the inference engines.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed
from megatron.core.tensor_parallel import random as megatron_random

from megatron_ext.upstream.adam import GroupStepAdam
from megatron_ext.upstream.cuda_on_cpu import (
    resident_peak_bytes,
    tensor_cuda,
    tensor_type,
    torch_on_cpu,
)
from megatron_ext.upstream.machine import this_machine
from megatron_ext.upstream.patches import Patch, applied

_TORCH_USERS = {
    "core.dist_checkpointing.exchange_utils": "buffers of the parallel load on device='cuda'",
    "core.dist_checkpointing.strategies.filesystem_async": "synchronize before the write",
    "core.dist_checkpointing.strategies.fully_parallel": "synchronize around the exchange",
    "core.dist_checkpointing.strategies.state_dict_saver": "status tensor on the current device",
    "core.distributed.param_and_grad_buffer": "buffers on current_device, communication streams",
    "core.models.common.embeddings.rotary_pos_embedding": "inv_freq on current_device",
    "core.models.common.embeddings.yarn_rotary_pos_embedding": "inv_freq on current_device",
    "core.optimizer.clip_grads": "norms on device='cuda'",
    "core.optimizer.distrib_optimizer": "shards on current_device",
    "core.optimizer.grad_scaler": "scale on device='cuda'",
    "core.optimizer.optimizer": "found_inf on device='cuda'",
    "core.pipeline_parallel.p2p_communication": "receive buffers on current_device, synchronize",
    "core.pipeline_parallel.schedules": "token counter on device='cuda'",
    "core.rerun_state_machine": "device number in the message about a gradient that is NaN",
    "core.tensor_parallel.layers": "gather buffers on current_device",
    "core.tensor_parallel.mappings": "gather buffers on current_device",
    "core.tensor_parallel.random": "torch.cuda RNG functions",
    "core.tensor_parallel.utils": "gather buffer on current_device",
    "core.transformer.moe.router": "bias and counter buffers on current_device",
    "core.transformer.moe.shared_experts": "stream of the shared experts",
    "core.transformer.moe.token_dispatcher": "side stream, device of the index tensors",
    "core.utils": "memory buffer and counters on current_device",
    "training.checkpointing": "RNG state of torch.cuda, flags on device='cuda'",
    "training.initialize": "set_device and the CUDA seeds only when device_count() > 0",
    "training.models.dist_utils": "streams around the DDP wrapper",
    "training.utils.common_utils": "norms and times on device='cuda', device properties",
}
"""Megatron's modules that get ``torch_on_cpu``, and what for."""


def _set_rng_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """``maybe_move_tensor_to_cpu`` for a tensor that is on the CPU already."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _share_storage(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Give ``dst`` the bytes of ``src`` below autograd: no version bump, views see them too."""
    storage = dst.untyped_storage()
    storage.resize_(src.untyped_storage().nbytes())
    storage.copy_(src.untyped_storage(), non_blocking=False)


def _get_share_storage() -> Any:
    return _share_storage


_checkpoint_init = megatron_random.CheckpointWithoutOutput.__init__


def _init_checkpoint_without_fp8(self: Any, fp8: Any = False) -> None:
    _checkpoint_init(self, fp8=fp8 or None)  # type: ignore[arg-type]  # None means no FP8


def _row(
    target: str,
    replacement: Any,
    params: tuple[str, ...] | None = None,
    *,
    why: str,
    remove_when: str = "Megatron takes the device as a value",
) -> Patch:
    return Patch(
        target=f"megatron.{target}",
        replacement=replacement,
        params=params,
        why=why,
        remove_when=remove_when,
    )


def _adam_row(target: str, replacement: Any) -> Patch:
    return _row(
        target,
        replacement,
        why="Megatron's checkpoint code is right only for fused Adam's state layout (adam.py)",
        remove_when="a run with torch's AdamW resumes bit for bit",
    )


_RANDOM = "core.tensor_parallel.random"

CPU_PATCHES = (
    *(_row(f"{name}:torch", torch_on_cpu, why=why) for name, why in _TORCH_USERS.items()),
    Patch(
        target="torch:Tensor.cuda",
        replacement=tensor_cuda,
        params=None,
        why="Megatron moves tensors with .cuda()",
        remove_when="Megatron takes the device as a value",
    ),
    Patch(
        target="torch:Tensor.type",
        replacement=tensor_type,
        params=None,
        why="Megatron's optimizers compare the name with torch.cuda.FloatTensor",
        remove_when="they compare dtypes",
    ),
    _row(
        f"{_RANDOM}:_set_cuda_rng_state",
        _set_rng_state,
        ("new_state", "device", "graph_safe"),
        why="sets a CUDA generator through torch.cuda's private functions",
    ),
    _row(
        f"{_RANDOM}:CheckpointWithoutOutput.__init__",
        _init_checkpoint_without_fp8,
        ("self", "fp8"),
        why="takes fp8=False for FP8 and dies in a NameError without Transformer Engine",
        remove_when="fp8=False means no FP8",
    ),
    _row(
        f"{_RANDOM}:_get_share_storage",
        _get_share_storage,
        (),
        why="compiles a C++ extension, for which a machine needs a compiler and a minute",
        remove_when="it comes compiled",
    ),
    _row(
        "core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
        _to_host,
        ("tensor", "as_numpy", "record_stream"),
        why="returns a tensor instead of numpy when the tensor is on the CPU already",
        remove_when="it returns numpy for both",
    ),
    _adam_row("core.optimizer:Adam", GroupStepAdam),
    _adam_row("core.optimizer:USING_PYTORCH_OPTIMIZER", False),
    _adam_row("core.optimizer.distrib_optimizer:HAVE_APEX_OR_TE", True),
)


@contextmanager
def device_mode(*, has_cuda: bool | None = None) -> Iterator[None]:
    """Run the block with Megatron on this machine's device: patched only where there is no CUDA.

    Blocks can be nested.  has_cuda: None = what torch sees.
    """
    on_cpu = not (this_machine().has_cuda if has_cuda is None else has_cuda)
    with ExitStack() as undo:
        # Megatron asserts it for tensor parallelism; it must be set before CUDA starts.
        _set_environment("CUDA_DEVICE_MAX_CONNECTIONS", "1", undo)
        if on_cpu:
            undo.enter_context(applied(CPU_PATCHES))
            # Megatron compiles small functions at import; on CPU they would need a C++ compiler.
            undo.enter_context(torch.compiler.set_stance("force_eager"))
            _silence_forks(undo)
        yield


def peak_memory_bytes() -> int:
    """Peak memory of this rank so far: allocated on its GPU, or resident where there is none."""
    return torch.cuda.max_memory_allocated() if this_machine().has_cuda else resident_peak_bytes()


def _set_environment(name: str, value: str, undo: ExitStack) -> None:
    if name not in os.environ:
        os.environ[name] = value
        undo.callback(os.environ.pop, name, None)


def _silence_forks(undo: ExitStack) -> None:
    """The tracked generator is the CPU's, so Megatron's warning that the CPU's moved is no news."""
    logger = logging.getLogger(megatron_random.__name__)
    if _is_news not in logger.filters:
        logger.addFilter(_is_news)
        undo.callback(logger.removeFilter, _is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return record.msg != "CPU RNG state changed within GPU RNG context"
