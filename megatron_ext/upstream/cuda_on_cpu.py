"""A ``torch`` namespace for machines without CUDA: every CUDA call means the CPU.

Megatron names CUDA literally (``device="cuda"``, ``torch.cuda.Stream()``).  Its modules look
``torch`` up in their own globals, so giving a module this namespace in place of ``torch`` changes
what *that module* sees and nothing else: torch itself, and every other library, is untouched.  A
look-up costs what it cost before; only the few wrapped functions add a Python call.
Invariant the tests check: apart from the names replaced here it is torch, object by object, and
every CUDA name that Megatron's patched modules use is replaced or harmless.
Not covered: CUDA graphs, symmetric memory, FP8, memory pools (they need the hardware).
"""

from __future__ import annotations

import functools
import resource
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed

CONSTRUCTORS = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "full",
    "ones",
    "rand",
    "tensor",
    "zeros",
)
"""Functions of torch that Megatron's patched modules call with a device."""
_CPU = torch.device("cpu")


class Stream:
    """CPU work is already in order, so a stream has nothing to wait for."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def wait_stream(self, _stream: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, _event: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Event | None = None) -> Event:
        """An event that has already happened."""
        return event if event is not None else Event()


class Event:
    """An event that has already happened."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def record(self, _stream: Any = None) -> None:
        """Nothing to record."""

    def wait(self, _stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Whether it has happened: always."""
        return True


class FinishedWork:
    """Handle of a collective that has been done already."""

    def wait(self) -> bool:
        """Whether it succeeded: it did."""
        return True

    def is_completed(self) -> bool:
        """Whether it is done: it is."""
        return True


def resident_peak_bytes() -> int:
    """Peak resident memory of this process (bytes)."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def tensor_cuda(self: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    """``Tensor.cuda``: the tensor is already where it is going to be used."""
    return self


_tensor_type = torch.Tensor.type


def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """``Tensor.type``: Megatron's optimizers compare the name with ``torch.cuda.FloatTensor``."""
    result = _tensor_type(self, *args, **kwargs)
    if isinstance(result, str) and self.device.type == "cpu":
        return result.replace("torch.", "torch.cuda.", 1)
    return result


def _on_cpu(device: Any) -> Any:
    is_cuda = isinstance(device, int) or str(device).startswith("cuda")
    return _CPU if is_cuda else device


def _constructor(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            del kwargs["pin_memory"]
        return function(*args, **kwargs)

    return on_cpu


class _DeviceMeta(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.device)

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
        first = args[0] if args else kwargs.get("type", "cpu")
        return _CPU if _on_cpu(first) is _CPU else torch.device(*args, **kwargs)


class _Device(metaclass=_DeviceMeta):
    """``torch.device`` that reads ``cuda`` as ``cpu``."""


def all_gather(
    tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """``all_gather`` that gloo also does for unequal shapes: pad to the largest, gather, cut."""
    if len({output.shape for output in tensor_list}) <= 1:
        return torch.distributed.all_gather(tensor_list, tensor, group=group, async_op=async_op)
    padded = tensor.new_zeros(max(output.numel() for output in tensor_list))
    padded[: tensor.numel()] = tensor.reshape(-1)
    gathered = [torch.empty_like(padded) for _ in tensor_list]
    torch.distributed.all_gather(gathered, padded, group=group)
    for output, values in zip(tensor_list, gathered, strict=True):
        output.copy_(values[: output.numel()].view_as(output))
    return FinishedWork() if async_op else None


def _nothing(*_args: Any, **_kwargs: Any) -> None: ...


def _no_context(*_args: Any, **_kwargs: Any) -> AbstractContextManager[None]:
    return nullcontext()


def _rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(new_state)


def _cuda_names() -> dict[str, Any]:
    """What replaces names of ``torch.cuda``: one device, and it is the CPU."""
    stream = Stream()
    return {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda *_: stream,
        "stream": _no_context,
        "set_stream": _nothing,
        "synchronize": _nothing,
        "current_device": lambda: _CPU,
        "device_count": lambda: 1,
        "set_device": _nothing,
        "get_device_properties": lambda *_: SimpleNamespace(major=9, minor=0, name="cpu"),
        "empty_cache": _nothing,
        "memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "max_memory_allocated": lambda *_: resident_peak_bytes(),
        "max_memory_reserved": lambda *_: resident_peak_bytes(),
        "manual_seed": torch.manual_seed,
        "get_rng_state": _rng_state,
        "set_rng_state": _set_rng_state,
        "random": SimpleNamespace(get_rng_state=_rng_state),
    }


def _namespace(module: ModuleType, **replaced: Any) -> ModuleType:
    """A module that is ``module`` apart from some names; names it gets later are seen as well."""
    namespace = ModuleType(module.__name__, module.__doc__)
    vars(namespace).update(vars(module))
    vars(namespace).update(replaced, __getattr__=lambda name: getattr(module, name))
    return namespace


torch_on_cpu = _namespace(
    torch,
    cuda=_namespace(torch.cuda, **_cuda_names()),
    distributed=_namespace(torch.distributed, all_gather=all_gather),
    device=_Device,
    **{name: _constructor(getattr(torch, name)) for name in CONSTRUCTORS},
)
"""``torch``, with the CPU in place of every CUDA device."""
