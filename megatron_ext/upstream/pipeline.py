"""Communication between pipeline stages: Megatron's, counted, optionally with scatter/gather."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.parallel.scatter_gather import (
    KeepAlive,
    PipelineTraffic,
    ThenGather,
    empty_full,
    gather_into,
    scatter,
)
from megatron_ext.upstream.layout import Layout


class CountingP2P(P2PCommunicator):
    """Megatron's point-to-point communication that counts the bytes this rank sends."""

    def __init__(self, pp_group: ProcessGroup, config: TransformerConfig) -> None:
        super().__init__(pp_group, config)
        self.traffic = PipelineTraffic()

    def _communicate(self, **kwargs: Any) -> tuple[Tensor | None, Tensor | None, Any]:
        self.traffic.add(kwargs["tensor_send_next"])
        self.traffic.add(kwargs["tensor_send_prev"])
        return super()._communicate(**kwargs)  # type: ignore[return-value]


class ScatterGatherP2P(CountingP2P):
    """Sends 1/t of each boundary tensor per tensor-parallel rank (``parallel.scatter_gather``)."""

    def __init__(
        self, pp_group: ProcessGroup, config: TransformerConfig, *, tp_group: ProcessGroup
    ) -> None:
        super().__init__(pp_group, config)
        self.tp_group = tp_group

    def _communicate(self, **kwargs: Any) -> tuple[Tensor | None, Tensor | None, Any]:
        for side in ("tensor_send_next", "tensor_send_prev"):
            if kwargs[side] is not None:
                kwargs[side] = scatter(kwargs[side], group=self.tp_group)
        if kwargs["tensor_shape"]:
            s, b, d = kwargs["tensor_shape"]
            kwargs["tensor_shape"] = (s, b, d // self.tp_group.size())
        part_prev, part_next, requests = super()._communicate(**kwargs)
        full_prev, finish_prev = self._whole(part_prev)
        full_next, finish_next = self._whole(part_next)
        if not requests:
            finish_prev()
            finish_next()
            return full_prev, full_next, requests
        assert isinstance(requests, dict), "only the overlapped schedule returns open requests"
        handles = {
            "recv_prev": lambda request: ThenGather(request, finish_prev),
            "recv_next": lambda request: ThenGather(request, finish_next),
            "send_next": lambda request: KeepAlive(request, kwargs["tensor_send_next"]),
            "send_prev": lambda request: KeepAlive(request, kwargs["tensor_send_prev"]),
        }
        wrapped = {name: handles[name](request) for name, request in requests.items()}
        return full_prev, full_next, wrapped

    def _whole(self, part: Tensor | None) -> tuple[Tensor | None, Any]:
        if part is None:
            return None, lambda: None
        full = empty_full(part, group=self.tp_group)
        return full, partial(gather_into, full, part, group=self.tp_group)


def build_communicator(
    config: TransformerConfig, layout: Layout, *, scatter_gather: bool
) -> CountingP2P:
    """The communicator of this rank's pipeline."""
    if scatter_gather:
        return ScatterGatherP2P(layout.groups.pp, config, tp_group=layout.groups.tp)
    return CountingP2P(layout.groups.pp, config)
