"""Decoding on the training model's own chunks, in any layout of tensor, pipeline and data ranks.

One rank of each model replica drives: the last pipeline stage's first tensor-parallel rank, where
logits end up.  It decides on a step and sends the plan to the others, which carry it out: hidden
states go from stage to stage, chunk by chunk under interleaving, and logits are gathered from the
tensor-parallel ranks of the last stage, those of the wanted tokens only.
Replicas decode on their own, unless experts are spread over them: then they step together.
Invariant the tests check: every layout gives the tokens and log-probabilities of one process.
Not covered: context parallelism; steps that overlap in a pipeline (its stages take turns).

Legend: T tokens of a step, D model, N wanted tokens, V vocabulary columns of this rank.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_ext.rollout.attention import CacheIndex
from megatron_ext.rollout.cache import SlotCache
from megatron_ext.rollout.step_plan import StepPlan
from megatron_ext.upstream.decode_attention import Rotary, StepTensors
from megatron_ext.upstream.decode_layers import LayerFunction, layer_as_it_is, layer_function
from megatron_ext.upstream.decode_mode import decode_mode
from megatron_ext.upstream.decode_parts import (
    cache_fields,
    gather_columns,
    rank_of_driver,
    refuse_undecodable,
    rotary_table,
)
from megatron_ext.upstream.decode_product import Function, PackedProducts
from megatron_ext.upstream.layout import Layout
from megatron_ext.upstream.model import bare

_FIRST_PART = 1024
"""Integers of a plan that are sent at once; a longer plan takes a second message."""


class DriverFailed(RuntimeError):
    """The rank that drives the rollout raised; its message says what."""


class MegatronDecoder:
    """Carries out step plans on this rank's chunks; `rollout.engine.Decoder` for the driver."""

    def __init__(
        self,
        args: Namespace,
        layout: Layout,
        chunks: Sequence[MegatronModule],
        *,
        by_parts: bool = True,
    ) -> None:
        """Collective over the ranks of the replica.

        chunks: this rank's, wrapped for training or not; used as they are, not copied.
        by_parts: False = every layer runs through Megatron's own forward, which takes longer.

        Raises:
            ValueError: the model has parts that cannot decode, or cannot agree with the trainer.
        """
        self.vocab_size: int = args.vocab_size
        self.max_context: int = args.max_position_embeddings
        self.chunks, self.models = list(chunks), [bare(chunk) for chunk in chunks]
        self.layout, self._by_parts = layout, by_parts
        refuse_undecodable(args, self.models)
        config = self.models[0].config
        self.dtype = config.params_dtype
        self.device = next(self.models[0].parameters()).device
        self._hidden_size = config.hidden_size
        self._hidden_dtype = torch.float32 if config.fp32_residual_connection else self.dtype
        self.is_driver = layout.is_last_stage and layout.groups.tp.rank() == 0
        self._driver = rank_of_driver(self.is_driver, group=layout.groups.mp, device=self.device)
        self._is_alone = layout.groups.mp.size() == 1
        self._in_lockstep = layout.groups.ep.size() > 1 and layout.dp_size > 1
        self.cache = SlotCache(
            cache_fields(self.models),
            num_layers=sum(len(model.decoder.layers) for model in self.models),
            dtype=self.dtype,
            device=self.device,
        )
        self._layers: list[list[LayerFunction]] = []
        self._output: Function | None = None
        self._rotary: Rotary | None = None
        self._rotary_length = 0

    def run[Result](self, drive: Callable[[], Result]) -> Result:
        """Call `drive` on the driver, carry out its plans on the others; its result on all ranks.

        Every replica must call it where parameter all-gathers overlap with the training forward.

        Raises:
            DriverFailed: on the other ranks, if `drive` raised.
        """
        with decode_mode(self.chunks):
            product = PackedProducts()
            function = layer_as_it_is
            if self._by_parts:
                function = partial(layer_function, product=product)
            self._layers = [[function(x) for x in m.decoder.layers] for m in self.models]
            if self.layout.is_last_stage:
                self._output = product(_output_weight(self.models[-1]))
            self.cache.drop()
            try:
                return self._drive(drive) if self.is_driver else self._follow()
            finally:
                self._layers, self._output = [], None
                self.cache.drop()

    def forward(self, plan: StepPlan) -> Tensor:
        """Logits [N, vocabulary] of the wanted tokens, fp32; only the driver calls it."""
        if not self._is_alone:
            self._send(plan.to_integers())
        logits = self._carry_out(plan)
        assert logits is not None, "the driver is on the last stage"
        return logits

    def is_any_working(self, is_working: bool) -> bool:
        """Whether this replica, or one that must step with it, has work.  On drivers only."""
        if not self._in_lockstep:
            return is_working
        flag = torch.tensor(int(is_working), device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.layout.groups.dp)
        return bool(flag)

    def _drive[Result](self, drive: Callable[[], Result]) -> Result:
        outcome: list[Any] = [None, "did not finish"]
        try:
            outcome = [drive(), None]
        finally:
            if outcome[1] is not None:
                error = sys.exception()
                outcome[1] = f"{type(error).__name__}: {error}"
            if not self._is_alone:
                self._send([0])
                dist.broadcast_object_list(outcome, src=self._driver, group=self.layout.groups.mp)
        return outcome[0]

    def _follow(self) -> Any:
        while len(integers := self._receive()) > 1:
            self._carry_out(StepPlan.from_integers(integers))
        outcome: list[Any] = [None, None]
        dist.broadcast_object_list(outcome, src=self._driver, group=self.layout.groups.mp)
        if outcome[1] is not None:
            raise DriverFailed(f"the rollout's driver, rank {self._driver}, raised {outcome[1]}")
        return outcome[0]

    def _send(self, integers: list[int]) -> None:
        """Send a plan, integers with their number first, to the others; [0] ends the rollout."""
        padded = integers + [0] * (_FIRST_PART - len(integers))
        for part in (padded[:_FIRST_PART], padded[_FIRST_PART:]):
            if part:
                self._broadcast(torch.tensor(part, device=self.device))

    def _receive(self) -> list[int]:
        integers = self._broadcast(torch.zeros(_FIRST_PART, dtype=torch.int64, device=self.device))
        found = integers.tolist()
        missing = found[0] + 1 - _FIRST_PART
        if missing > 0:
            rest = torch.zeros(missing, dtype=torch.int64, device=self.device)
            found += self._broadcast(rest).tolist()
        return found[: found[0] + 1]

    def _broadcast(self, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, src=self._driver, group=self.layout.groups.mp)
        return tensor

    def _carry_out(self, plan: StepPlan) -> Tensor | None:
        """This rank's part of a step; the logits on the driver."""
        self._prepare_cache(plan)
        step = self._step_tensors(plan)
        pp, last = self.layout.groups.pp, self.layout.pp_size - 1
        first_layer, hidden_TD = 0, None
        for number, model in enumerate(self.models):
            if model.pre_process:
                hidden_TD = self._embed(model, plan, step.index)
            else:
                shape = (len(plan.tokens), self._hidden_size)
                hidden_TD = torch.empty(shape, dtype=self._hidden_dtype, device=self.device)
                dist.recv(hidden_TD, group=pp, group_src=(pp.rank() - 1) % pp.size())
            for place, layer in enumerate(self._layers[number], start=first_layer):
                hidden_TD = layer(hidden_TD, step, self.cache.layer(place))
            first_layer += len(self._layers[number])
            if not model.post_process:
                dist.send(hidden_TD.contiguous(), group=pp, group_dst=(pp.rank() + 1) % pp.size())
        self.cache.copy(plan.later_copies)
        if pp.rank() != last:
            return None
        assert hidden_TD is not None, "every stage has a chunk"
        return self._logits(self.models[-1], hidden_TD, plan)

    def _prepare_cache(self, plan: StepPlan) -> None:
        if plan.num_slots < self.cache.num_slots:
            self.cache.copy(plan.copies)
            self.cache.resize(plan.num_slots, plan.capacity)
        else:
            self.cache.resize(plan.num_slots, plan.capacity)
            self.cache.copy(plan.copies)

    def _step_tensors(self, plan: StepPlan) -> StepTensors:
        index = CacheIndex.of(plan, dtype=self.dtype, device=self.device)
        if plan.capacity > self._rotary_length:
            self._rotary_length = plan.capacity
            self._rotary = rotary_table(self.models[0], length=plan.capacity, dtype=self.dtype)
        rotary = None if self._rotary is None else self._rotary.at(index.positions_T)
        return StepTensors(index=index, rotary=rotary)

    def _embed(self, model: GPTModel, plan: StepPlan, index: CacheIndex) -> Tensor:
        tokens_T = torch.tensor(plan.tokens, device=self.device)
        return model.embedding(tokens_T[None], index.positions_T[None])[:, 0]

    def _logits(self, model: Any, hidden_TD: Tensor, plan: StepPlan) -> Tensor | None:
        """Logits of the wanted tokens, real vocabulary only, on the driver."""
        hidden_ND = hidden_TD
        if len(plan.wanted) < len(plan.tokens):
            rows_N = torch.tensor(plan.wanted, dtype=torch.int64, device=self.device)
            hidden_ND = hidden_TD[rows_N]
        if model.decoder.final_layernorm is not None:
            hidden_ND = model.decoder.final_layernorm(hidden_ND)
        assert self._output is not None, "run() makes it on the last stage"
        logits_NV = model._scale_logits(self._output(hidden_ND))
        tp = self.layout.groups.tp
        if tp.size() > 1:
            logits_NV = gather_columns(logits_NV, group=tp)
        if logits_NV is None:
            return None
        return logits_NV[:, : self.vocab_size].float()


def _output_weight(model: Any) -> Tensor:
    """[vocabulary of this rank, D] of the model's output layer."""
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight
