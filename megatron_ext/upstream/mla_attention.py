"""Attention converted by `megatron_ext.mla`, as a Megatron module on tensor-parallel ranks.

Both layouts are one module: from the hidden states a latent and B rotary keys (one for each KV head
in `paper`, one for all in `deepseek`), from the latent each KV head's plain keys and its values.
The keys that Megatron's attention kernels see are rotary and plain widths side by side.

Under tensor parallelism heads are divided; the down projection is the same on every rank, because
its outputs are needed by all heads and are narrow.  Its output is gathered where the hidden states
are divided by positions, and its gradient is summed over the ranks' heads.
Invariants the tests check: with all pairs and at full rank the logits are the original model's;
loss and gradients are the same on every layout; frequencies are part of the checkpoint and survive
16-bit models.
Not covered: context parallelism, decoding.

Legend: S positions (S/t under sequence parallelism), B rows or rotary keys, D model, H query heads,
G KV heads, K rotary pairs, C = 2 K, N and V plain widths of keys and values, R latent.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.attention import Attention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_ext.mla.forward import normalised
from megatron_ext.upstream.mla_parts import LatentShape, SharedLinear, with_widths
from megatron_ext.upstream.rotary import positions_in_segments


class ConvertedAttention(Attention):
    """Causal self-attention with partial RoPE and a joint latent of keys and values."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        latent: LatentShape,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        pp_layer_offset: int | None = None,
        name: str | None = None,
    ) -> None:
        """Raises ValueError: tensor parallelism does not divide the KV heads."""
        width = int(config.kv_channels or 0)
        self_widths = latent.plain_width(width), width
        key_width = latent.rotary_width + self_widths[0]
        super().__init__(
            config=config,
            submodules=with_widths(submodules, config, latent, key_width=key_width),
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="self",
            cp_comm_type=cp_comm_type,
            pg_collection=pg_collection,
            pp_layer_offset=pp_layer_offset,
            name=name,
        )
        self.latent = latent
        self.plain_width, self.value_width = self_widths
        groups, heads = int(config.num_query_groups or 0), config.num_attention_heads
        if groups % self.tp_group.size():
            raise ValueError(
                f"--tensor-model-parallel-size {self.tp_group.size()} does not divide the "
                f"{groups} KV heads of converted attention: use a divisor of {groups}."
            )
        self.num_rotary_keys = latent.num_rotary_keys(groups)
        self.linear_q_down = None
        if latent.query_rank:
            self.linear_q_down = SharedLinear(config.hidden_size, latent.query_rank, config)
        self.linear_q = self._column(
            latent.query_rank or config.hidden_size, heads * key_width, bias=latent.has_query_bias
        )
        rotary_widths = self.num_rotary_keys * latent.rotary_width
        self.linear_kv_down = SharedLinear(config.hidden_size, latent.rank + rotary_widths, config)
        self.linear_kv_up = self._column(latent.rank, groups * sum(self_widths), bias=False)
        self.key_rotary_bias = None
        if latent.has_key_rotary_bias:
            self.key_rotary_bias = torch.nn.Parameter(
                torch.zeros(rotary_widths, dtype=config.params_dtype, device=_device(self.linear_q))
            )
            vars(self.key_rotary_bias)["sequence_parallel"] = config.sequence_parallel
        self.query_norm = self.key_norm = None
        if latent.has_norms:
            shape = self.num_query_groups_per_partition, key_width
            self.query_norm, self.key_norm = (
                torch.nn.Parameter(
                    torch.ones(shape, dtype=config.params_dtype, device=_device(self.linear_q))
                )
                for _ in range(2)
            )
        steps_K = torch.arange(latent.num_pairs, dtype=torch.float32) / max(latent.num_pairs, 1)
        frequencies_BK = (10_000.0**-steps_K).expand(self.num_rotary_keys, -1)
        # Integers, because a model of 16 bits rounds all its floating-point buffers.
        bits_BK = frequencies_BK.contiguous().view(torch.int32).to(_device(self.linear_q))
        self.register_buffer("frequency_bits", bits_BK)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: object = None,
        packed_seq_params: PackedSeqParams | None = None,
        inference_context: object = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[S, B, D] normalised hidden states to [S, B, D], and the bias that is to be added."""
        assert rotary_pos_emb is None, "converted attention turns its keys by its own frequencies"
        assert inference_context is None, "Megatron's inference is not used with this attention"
        query, key, value = self.get_query_key_value_tensors(
            hidden_states, packed_seq_params=packed_seq_params
        )
        run = self._run_core_attention
        if self.checkpoint_core_attention and self.training:
            run = self._checkpointed_attention_forward
        out = run(
            query,
            key,
            value,
            attention_mask,
            attn_mask_type=self.attn_mask_type,
            packed_seq_params=packed_seq_params,
        )
        if packed_seq_params is not None:
            out = out.reshape(out.shape[0], 1, -1)
        return self.linear_proj(out)

    def get_query_key_value_tensors(  # type: ignore[override]
        self, hidden_states: Tensor, *, packed_seq_params: PackedSeqParams | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [S, B, H/t, C + N], keys [S, B, G/t, C + N], values [S, B, G/t, V], all turned;
        without B in a packed row."""
        latent, groups = self.latent, self.num_query_groups_per_partition
        queried = hidden_states
        if self.linear_q_down is not None:
            queried = self.linear_q_down(hidden_states)
        query, _ = self.linear_q(queried)
        query = query.unflatten(-1, (self.num_attention_heads_per_partition, -1))
        shared = self.linear_kv_down(hidden_states)
        latent_SBR, rotary = shared.split([latent.rank, shared.shape[-1] - latent.rank], dim=-1)
        up, _ = self.linear_kv_up(latent_SBR)
        key_plain, value = up.unflatten(-1, (groups, -1)).split(
            [self.plain_width, self.value_width], dim=-1
        )
        key_rotary = self._rotary_keys(rotary)
        key = torch.cat((key_rotary.expand(*key_plain.shape[:-1], -1), key_plain), dim=-1)
        query, key = self._normalised(query, key)
        query, key = self._turned(query, key, packed_seq_params)
        if packed_seq_params is not None:
            return query.squeeze(1), key.squeeze(1), value.squeeze(1)
        return query, key, value

    def frequencies(self) -> Tensor:
        """Radians per position [B, K] of every rotary key, on every rank all of them."""
        return self.frequency_bits.view(torch.float32)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict | None = None,
    ) -> dict[str, Any]:
        """Megatron's description, with the norms divided by KV heads."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        own = {n: p for n, p in self.named_parameters(recurse=False) if n.endswith("_norm")}
        return state | make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(own, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )

    def _column(self, size_in: int, size_out: int, *, bias: bool) -> ColumnParallelLinear:
        return ColumnParallelLinear(
            size_in,
            size_out,
            config=self.config,
            init_method=self.config.init_method,
            bias=bias,
            gather_output=False,
            skip_bias_add=False,
            tp_group=self.tp_group,
        )

    def _rotary_keys(self, rotary: Tensor) -> Tensor:
        """Rotary keys [S, B, G/t or 1, C] of this rank's heads at all positions."""
        if self.key_rotary_bias is not None:
            rotary = rotary + self.key_rotary_bias
        if self.config.sequence_parallel:
            rotary = gather_from_sequence_parallel_region(
                rotary, tensor_parallel_output_grad=True, group=self.tp_group
            )
        else:
            rotary = copy_to_tensor_model_parallel_region(rotary, group=self.tp_group)
        keys = rotary.unflatten(-1, (self.num_rotary_keys, -1))
        return self._mine(keys, dim=-2)

    def _mine(self, keys: Tensor, *, dim: int) -> Tensor:
        """Of something by rotary key, what this rank's heads use."""
        if self.num_rotary_keys == 1:
            return keys
        return keys.chunk(self.tp_group.size(), dim=dim)[self.tp_group.rank()]

    def _normalised(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if self.query_norm is None or self.key_norm is None:
            return query, key
        epsilon = self.config.layernorm_epsilon
        per_group = self.num_attention_heads_per_partition // self.num_query_groups_per_partition
        query_norm = self.query_norm.repeat_interleave(per_group, 0)
        query = normalised(query.float(), epsilon=epsilon).to(query.dtype) * query_norm
        return query, normalised(key.float(), epsilon=epsilon).to(key.dtype) * self.key_norm

    def _turned(
        self, query: Tensor, key: Tensor, packed: PackedSeqParams | None
    ) -> tuple[Tensor, Tensor]:
        """RoPE of the first C widths, whose first half are real and second half imaginary parts."""
        if packed is None:
            positions_S = torch.arange(query.shape[0], device=query.device)
        else:
            positions_S = positions_in_segments(packed.cu_seqlens_q)
        frequencies_BK = self._mine(self.frequencies(), dim=0)
        angles_S1BK = positions_S[:, None, None, None] * frequencies_BK
        cos, sin = angles_S1BK.cos().to(query.dtype), angles_S1BK.sin().to(query.dtype)
        per_key = query.shape[-2] // cos.shape[-2]
        width = self.latent.rotary_width
        turned = []
        for x, repeats in ((query, per_key), (key, key.shape[-2] // cos.shape[-2])):
            c, s = (f.repeat_interleave(repeats, dim=-2) for f in (cos, sin))
            rotary, plain = x.tensor_split([width], dim=-1)
            real, imaginary = rotary.chunk(2, dim=-1)
            parts = real * c - imaginary * s, imaginary * c + real * s, plain
            turned.append(torch.cat(parts, dim=-1))
        return turned[0], turned[1]


def use_converted_attention(layer: ModuleSpec, latent: LatentShape) -> None:
    """Put `ConvertedAttention` into a local layer spec, with that spec's core attention."""
    attention: Any = layer.submodules.self_attention  # type: ignore[union-attr]
    layer.submodules.self_attention = ModuleSpec(  # type: ignore[union-attr]
        module=ConvertedAttention,
        params={**attention.params, "latent": latent},
        submodules=attention.submodules,
    )


def _device(linear: ColumnParallelLinear) -> torch.device:
    return linear.weight.device
