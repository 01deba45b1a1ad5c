"""Core attention of the local spec: causal inside each sequence, for padded and for packed rows.

Fills Megatron's ``core_attention`` slot where Transformer Engine is not used.  Megatron's own local
attention refuses packed rows and multi-latent head sizes, and builds an S x S mask.  On a GPU with
flash-attn installed, packed rows go to its variable-length kernel.

Legend: S positions, B rows, T packed positions, H query heads, G key/value heads, D and V widths.
"""

from __future__ import annotations

import contextlib
import importlib.util
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_ext.packing.attention import dense_attention, packed_attention

HAVE_FLASH_ATTENTION = importlib.util.find_spec("flash_attn") is not None


class SegmentAttention(torch.nn.Module):
    """Softmax attention in which a position sees its own sequence up to itself.

    Raises:
        ValueError: the configuration asks for what this attention does not do.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__()
        _refuse(config, attn_mask_type)
        self.config = config
        width = k_channels or config.kv_channels
        self.softmax_scale = width**-0.5 if softmax_scale is None else softmax_scale
        if config.apply_query_key_layer_scaling:
            self.softmax_scale /= max(1, layer_number)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """[S, B, H, D] or, packed, [T, H, D] queries -> [S, B, H * V] or [T, H * V]."""
        assert attention_mask is None, "the mask is causal per sequence; none can be given"
        assert attention_bias is None, "attention bias has no place in this attention"
        with self._random_state():
            if packed_seq_params is None:
                rows = [x.transpose(0, 1) for x in (query, key, value)]
                out_BSHV = dense_attention(
                    *rows, softmax_scale=self.softmax_scale, dropout=self._dropout_now()
                )
                return out_BSHV.transpose(0, 1).flatten(2)
            return self._packed(query, key, value, packed_seq_params).flatten(1)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams) -> Tensor:
        if query.is_cuda and HAVE_FLASH_ATTENTION and query.dtype != torch.float32:
            from flash_attn import flash_attn_varlen_func

            return flash_attn_varlen_func(
                query,
                key,
                value,
                packed.cu_seqlens_q,
                packed.cu_seqlens_kv,
                packed.max_seqlen_q,
                packed.max_seqlen_kv,
                dropout_p=self._dropout_now(),
                softmax_scale=self.softmax_scale,
                causal=True,
            )
        return packed_attention(
            query,
            key,
            value,
            cu_seqlens=packed.cu_seqlens_q,
            softmax_scale=self.softmax_scale,
            dropout=self._dropout_now(),
        )

    def _dropout_now(self) -> float:
        return self.dropout if self.training else 0.0

    def _random_state(self) -> Any:
        """Heads of different tensor-parallel ranks drop different weights."""
        if self._dropout_now() == 0.0 or self.config.sequence_parallel:
            return contextlib.nullcontext()
        return get_cuda_rng_tracker().fork()


def _refuse(config: TransformerConfig, attn_mask_type: AttnMaskType) -> None:
    wrong = []
    if config.context_parallel_size > 1:
        wrong.append(
            f"--context-parallel-size {config.context_parallel_size} needs Transformer Engine: use "
            "--transformer-impl transformer_engine on a GPU, or 1."
        )
    if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
        wrong.append(f"attention mask {attn_mask_type.name}: only causal attention is built.")
    if config.window_size is not None:
        wrong.append(f"--window-size {config.window_size}: sliding windows are not supported.")
    if config.softmax_type != "vanilla":
        wrong.append(f"--softmax-type {config.softmax_type}: only vanilla is supported.")
    if wrong:
        raise ValueError("\n  ".join(wrong))
