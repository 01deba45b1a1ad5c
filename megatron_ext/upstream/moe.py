"""Mixture-of-experts layers that never see padding, with auxiliary losses under the loss law.

Megatron's router is given the real tokens only: no padding counts for balance, capacity or the
z-loss, and none is sent to an expert (shared experts do run over it: they are dense).  Auxiliary
losses are sums over real tokens here; `Stepper` sets Megatron's scale so that the division by the
step's N makes them means over the step's real tokens, whatever is trained (docs/numerics.md).
Invariant the tests check: one router gradient for every packing and layout of a microbatch.
Not covered: what couples tokens by design.  `aux_loss` balances a microbatch, and a capacity is
that of a rank's share of it, so both depend on which sequences go together.

Legend: S positions (of this rank under sequence parallelism), B rows, T = S * B, N real tokens,
E experts, D model.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor
from torch.distributed import ProcessGroup


class RealTokenRouter(TopKRouter):
    """Megatron's top-k router, over real tokens only."""

    _row_N: Tensor
    """Row of each real token of the call in progress."""
    _num_rows: int

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Probabilities and choices [T, E] of logits [S, B, E]; both 0 at padding.

        padding_mask: bool [S, B], True = padding; None = there is none.
        """
        length, rows, num_experts = logits.shape
        if padding_mask is None:
            padding_mask = torch.zeros(length, rows, dtype=torch.bool, device=logits.device)
        real_N = (~padding_mask).reshape(-1).nonzero().squeeze(-1)
        self._row_N, self._num_rows = real_N % rows, rows
        logits_NE = logits.reshape(-1, num_experts).index_select(0, real_N)
        no_padding = torch.zeros(len(real_N), 1, dtype=torch.bool, device=logits.device)
        probs_NE, chosen_NE = super().routing(logits_NE.unsqueeze(1), no_padding)
        empty = probs_NE.new_zeros(length * rows, num_experts)
        chosen_TE = torch.zeros_like(empty, dtype=torch.bool).index_copy(
            0, real_N, chosen_NE.bool()
        )
        return empty.index_copy(0, real_N, probs_NE), chosen_TE

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count for the bias; there is no padding (Megatron's mask would not broadcast)."""
        super()._apply_expert_bias(routing_map)

    def _apply_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        with_padding_mask: bool = False,
    ) -> Tensor:
        """Balance over the microbatch's tokens (Fedus et al. 2021, eq. 4), times their number."""
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient == 0:
            return probs
        counts_E, total = self._counts(routing_map, group=self.tp_cp_group)
        loss = self._balance(scores_for_aux_loss, counts_E, total=total, coefficient=coefficient)
        name = "load_balancing_loss"
        return self._attach(probs, loss, total, coefficient=coefficient, name=name)

    def _apply_seq_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> Tensor:
        """Balance inside each padded row, a sequence, times the sequence's tokens."""
        coefficient = self.get_aux_loss_coeff("seq_aux_loss")
        if coefficient == 0:
            return probs
        shape = self._num_rows, self.num_experts
        chosen_BE = routing_map.new_zeros(shape, dtype=torch.float32)
        chosen_BE = chosen_BE.index_add(0, self._row_N, routing_map.float())
        chosen_BE = reduce_from_tensor_model_parallel_region(chosen_BE, self.tp_cp_group)
        scores_BE = scores_for_aux_loss.new_zeros(shape)
        scores_BE = scores_BE.index_add(0, self._row_N, scores_for_aux_loss)
        tokens_B1 = (chosen_BE.sum(dim=-1, keepdim=True) / self.topk).clamp(min=1)
        shares_BE = chosen_BE / (tokens_B1 * self.topk)
        total = chosen_BE.sum() / self.topk
        loss = coefficient * self.num_experts * (shares_BE * scores_BE).sum() / total.clamp(min=1)
        name = "seq_load_balancing_loss"
        return self._attach(probs, loss, total, coefficient=coefficient, name=name)

    def _apply_global_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        with_padding_mask: bool = False,
    ) -> Tensor:
        """Balance against the choices of all data-parallel ranks so far in the step."""
        coefficient = self.get_aux_loss_coeff("global_aux_loss")
        if coefficient == 0:
            return probs
        counts_E, total = self._counts(routing_map, group=self.tp_dp_cp_group)
        assert self.global_tokens_per_expert is not None, "the coefficient is above 0"
        self.global_tokens_per_expert += counts_E
        shares_E = self.global_tokens_per_expert / self.global_tokens_per_expert.sum().clamp(min=1)
        scores_E = scores_for_aux_loss.sum(dim=0)
        loss = coefficient * self.num_experts * (shares_E * scores_E).sum() / total.clamp(min=1)
        return self._attach(
            probs,
            loss,
            total,
            coefficient=coefficient,
            name="global_load_balancing_loss",
            group=self.tp_dp_cp_group,
        )

    def _counts(self, routing_map: Tensor, *, group: ProcessGroup) -> tuple[Tensor, Tensor]:
        """Choices of each expert [E] and tokens [], over the group."""
        counts_E = reduce_from_tensor_model_parallel_region(routing_map.sum(dim=0), group)
        return counts_E, counts_E.sum() / self.topk

    def _balance(
        self, scores_NE: Tensor, counts_E: Tensor, *, total: Tensor, coefficient: float
    ) -> Tensor:
        return switch_load_balancing_loss_func(
            probs=scores_NE,
            tokens_per_expert=counts_E,
            total_num_tokens=total.clamp(min=1),  # type: ignore[arg-type]
            topk=self.topk,
            num_experts=self.num_experts,
            moe_aux_loss_coeff=coefficient,
            fused=self.config.moe_router_fusion,
        )

    def _attach(
        self,
        probs: Tensor,
        loss: Tensor,
        total: Tensor,
        *,
        coefficient: float,
        name: str,
        group: ProcessGroup | None = None,
    ) -> Tensor:
        """Megatron's bookkeeping and backward of this rank's part of a mean over `total` tokens.

        Megatron multiplies by its own count and the group's size, as if ranks had equally many.
        """
        return self.attach_and_log_load_balancing_loss(
            probs,
            coefficient,
            loss,
            name,
            self.tp_cp_group if group is None else group,
            needs_dp_avg=group is None,
            valid_token_count=total / self.tp_cp_group.size(),
        )


class RealTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's all-to-all for tokens of which some are sent to no expert."""

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Tokens of each local expert; counts what is sent instead of topk for every position."""
        found = super().preprocess(routing_map)
        if not self.drop_and_pad:
            self.num_out_tokens = routing_map.sum()
            self._maybe_update_cuda_sync_point("before_permutation_1")
        return found


class RealTokenMoELayer(MoELayer):
    """Megatron's layer with the dispatcher above; checkpoint keys are Megatron's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        old = self.token_dispatcher
        if type(old) is not MoEAlltoAllTokenDispatcher:
            return  # DeepEP's counts what it sends
        self.token_dispatcher = RealTokenDispatcher(
            self.num_local_experts,
            self.local_expert_indices,
            config=self.config,
            pg_collection=kwargs.get("pg_collection"),
        )
        if old.shared_experts is not None:
            self.token_dispatcher.set_shared_experts(old.shared_experts)


def route_real_tokens(submodules: Any) -> None:
    """Put the router and the layer above into a transformer layer's spec, if it has experts."""
    mlp = submodules.mlp
    if not (isinstance(mlp, partial) and mlp.func is MoELayer):
        return
    experts: MoESubmodules = mlp.keywords["submodules"]
    submodules.mlp = partial(
        RealTokenMoELayer,
        submodules=MoESubmodules(
            experts=experts.experts,
            shared_experts=experts.shared_experts,
            router=RealTokenRouter,
        ),
    )
