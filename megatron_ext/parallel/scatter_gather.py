"""Scatter/gather of pipeline boundary tensors (Narayanan et al. 2021, section 4.1).

Without sequence parallelism all t tensor-parallel ranks of a stage hold the same boundary tensor,
and all of them would send all of it.  Each sends its 1/t instead, and the receiving stage
all-gathers the parts over its fast links: b s h / t numbers a rank and boundary between stages,
the same values.
Invariant the tests check: gather(scatter(x)) is x; the bytes sent are exactly 1/t.

Legend: S positions, B rows, D model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass
class PipelineTraffic:
    """What this rank has sent to neighbouring stages, shape handshakes left out."""

    messages: int = 0
    sent_bytes: int = 0

    def add(self, tensor: Tensor | None) -> None:
        """Count one sent tensor."""
        if tensor is not None:
            self.messages += 1
            self.sent_bytes += tensor.numel() * tensor.element_size()


def scatter(boundary_SBD: Tensor, *, group: ProcessGroup) -> Tensor:
    """This rank's 1/t of a boundary tensor, as a [S, B, D/t] view of contiguous memory."""
    s, b, d = boundary_SBD.shape
    size = group.size()
    assert d % size == 0, "tensor parallelism divides the hidden size"
    parts = boundary_SBD.contiguous().view(size, s, b, d // size)
    return parts[group.rank()]


def empty_full(part: Tensor, *, group: ProcessGroup) -> Tensor:
    """Where the whole boundary tensor of a [S, B, D/t] part will be: a leaf [S, B, D]."""
    s, b, d = part.shape
    full = torch.empty((s, b, d * group.size()), dtype=part.dtype, device=part.device)
    return full.requires_grad_(part.requires_grad)


@torch.no_grad()
def gather_into(full_SBD: Tensor, part: Tensor, *, group: ProcessGroup) -> None:
    """All-gather the parts of all ranks into the whole tensor, in place."""
    torch.distributed.all_gather_into_tensor(
        full_SBD.detach().view(-1), part.detach().reshape(-1), group=group
    )


class ThenGather:
    """A receive that is over when its parts have been gathered as well.

    Overlapped schedules hand out the buffer before the data are there and call ``wait()`` later.
    """

    def __init__(self, request: Any, finish: Callable[[], None]) -> None:
        self._request = request
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        """Wait for the part, then gather; a second call does nothing."""
        self._request.wait()
        if self._finish is not None:
            self._finish()
            self._finish = None


class KeepAlive:
    """A send whose buffer must live until it is over."""

    def __init__(self, request: Any, buffer: Tensor) -> None:
        self._request = request
        self._buffer: Tensor | None = buffer

    def wait(self) -> None:
        """Wait for the send, then let the buffer go."""
        self._request.wait()
        self._buffer = None
