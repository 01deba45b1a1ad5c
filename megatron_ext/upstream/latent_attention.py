"""Megatron's multi-latent attention without Transformer Engine, with right gradients under TP.

Two things are wrong in Megatron 0.19.2 with its local spec.  The rotary key, which all heads
share, gets on each tensor-parallel rank the gradient of that rank's heads only, and nothing adds
them up: the down projection and all that lies before it train on wrong gradients, with and without
sequence parallelism.  And DeepSeek-V2-Lite cannot be built: without a query latent a norm fused
into the query projection is demanded, which only Transformer Engine has and the model lacks.
Invariant the tests check: gradients with TP are those of one rank.

Legend: S positions (S/t under sequence parallelism), B rows, C latent width, R rotary width.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor


class LatentAttention(MLASelfAttention):
    """`MLASelfAttention` that sums the rotary key's gradient and takes the norms of its spec."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        has_query_latent = self.config.q_lora_rank is not None
        return {
            "linear_q_proj": submodules.linear_q_proj,
            "linear_q_up_proj": submodules.linear_q_up_proj,
            "linear_kv_up_proj": submodules.linear_kv_up_proj,
            "q_layernorm": submodules.q_layernorm if has_query_latent else IdentityOp,
            "kv_layernorm": submodules.kv_layernorm,
        }

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Query latent, and latent and rotary key side by side, [S, B, C + R], whole on every rank.

        Given them whole, the base class gathers the rotary key's sequence itself, which sums its
        gradient; without sequence parallelism it has to be summed here.
        """
        query, down = super()._qkv_down_projection(hidden_states)
        if self.tp_group.size() == 1:
            return query, down
        whole = gather_from_tensor_model_parallel_region(down, group=self.tp_group)
        if self.config.sequence_parallel:
            return query, scatter_to_sequence_parallel_region(whole, group=self.tp_group)
        latent, rotary = whole.split(
            [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1
        )
        rotary = copy_to_tensor_model_parallel_region(rotary, group=self.tp_group)
        return query, torch.cat([latent, rotary], dim=-1)


def use_latent_attention(layer: ModuleSpec) -> None:
    """Put `LatentAttention` into a local layer spec where Megatron's own is."""
    submodules: Any = layer.submodules
    attention = submodules.self_attention
    if attention.module is MLASelfAttention:
        attention.module = LatentAttention
