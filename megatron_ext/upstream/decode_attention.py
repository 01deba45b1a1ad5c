"""Attention modules while decoding: what they keep of a token, and how a step attends to it.

Keys and values for Megatron's attention; for its multi-latent attention the latent and the rotary
key that all heads share, with the up-projections absorbed into queries and outputs (DeepSeek-V2,
2024, section 2.1).  An attention module of another kind brings its own: a method `decoder()` that
returns an `AttentionDecoder`.
Invariant the tests check: equal to the module's own forward over the whole sequence.

Legend: T tokens of a step, D model, G key/value heads and R query heads of each on this rank, H all
of one kind, W width of a head, C latent width, P rotary width, K = C + P.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from megatron_ext.parallel.norm import RMSNorm
from megatron_ext.rollout.attention import CacheIndex, cached_attention, write
from megatron_ext.rollout.cache import CacheField
from megatron_ext.upstream.decode_product import Function, plain_product

Product = Callable[[Tensor, Tensor | None], Function]
"""(weight [out, in], bias) -> their product with tokens."""


class Rotary(NamedTuple):
    """Rotary embedding of some positions, each [positions, 1, 1, P]."""

    angles: Tensor
    """As Megatron takes them."""
    cos: Tensor
    sin: Tensor
    """Negated in the first half: rotating is multiplying by it the swapped halves."""

    @classmethod
    def of(cls, angles: Tensor, *, scale: float, dtype: torch.dtype) -> Rotary:
        """Factors as Megatron's attention computes them; `scale` is YaRN's, else 1."""
        cos, sin = ((f(angles) * scale).to(dtype) for f in (torch.cos, torch.sin))
        first, second = sin.chunk(2, dim=-1)
        return cls(angles, cos, torch.cat((-first, second), dim=-1))

    def at(self, positions_T: Tensor) -> Rotary:
        """Of the positions of a step's tokens."""
        return Rotary(*(table[positions_T] for table in self))


@dataclass(frozen=True, kw_only=True)
class StepTensors:
    """What all layers of a step share."""

    index: CacheIndex
    rotary: Rotary | None
    """Of each token's position; None without rotary embedding."""


class AttentionDecoder(Protocol):
    """An attention module's part in decoding; holds parameters, so it is made for each rollout."""

    fields: list[CacheField]
    """What it keeps of every token."""

    def rotary(self, model: GPTModel, *, length: int, dtype: torch.dtype) -> Rotary | None:
        """Rotary embedding of the first `length` positions; None without."""
        ...

    def __call__(self, x_TD: Tensor, step: StepTensors, cache: tuple[Tensor, ...]) -> Tensor:
        """Attend with normalised hidden states; the output projection and its bias included."""
        ...


def attention_decoder(attention: Any) -> AttentionDecoder | None:
    """The decoder of an attention module, or None if there is none."""
    if hasattr(attention, "decoder"):
        return attention.decoder()
    if isinstance(attention, MLASelfAttention):
        return LatentDecoder(attention)
    return KeyValueDecoder(attention) if isinstance(attention, SelfAttention) else None


class KeyValueDecoder:
    """Multi-head and grouped-query attention."""

    def __init__(self, attention: Any) -> None:
        self._groups = attention.num_query_groups_per_partition
        self._width = attention.hidden_size_per_attention_head
        self.fields = [CacheField(name, self._groups, self._width) for name in ("key", "value")]
        self.scale = _softmax_scale(attention)
        self._rotary_scale = attention._yarn_concentration_factor
        self._qkv = linear_function(attention.linear_qkv)
        self._proj = linear_function(attention.linear_proj)
        self._norms = None
        if attention.q_layernorm is not None or attention.k_layernorm is not None:
            self._norms = norm_function(attention.q_layernorm), norm_function(attention.k_layernorm)

    def rotary(self, model: GPTModel, *, length: int, dtype: torch.dtype) -> Rotary | None:
        """The model's own."""
        if model.position_embedding_type not in ("rope", "yarn"):
            return None
        found = model.rotary_pos_emb(length)
        angles = found[0] if isinstance(found, tuple) else found
        return Rotary.of(angles, scale=self._rotary_scale, dtype=dtype)

    def __call__(self, x_TD: Tensor, step: StepTensors, cache: tuple[Tensor, ...]) -> Tensor:
        """See `AttentionDecoder`."""
        qkv_TGHW = self._qkv(x_TD).view(len(x_TD), self._groups, -1, self._width)
        qk_TGHW = qkv_TGHW[:, :, :-1]
        if self._norms is not None:
            q_norm, k_norm = self._norms
            parts = [q_norm(qk_TGHW[:, :, :-1]), k_norm(qk_TGHW[:, :, -1:])]
            qk_TGHW = torch.cat(parts, dim=2)
        if step.rotary is not None:
            qk_TGHW = rotate(qk_TGHW, step.rotary)
        q_TGRW, k_TGW, v_TGW = qk_TGHW[:, :, :-1], qk_TGHW[:, :, -1], qkv_TGHW[:, :, -1]
        return self._proj(self.attend(q_TGRW, k_TGW, v_TGW, step, cache))

    def attend(
        self,
        q_TGRW: Tensor,
        k_TGW: Tensor,
        v_TGW: Tensor,
        step: StepTensors,
        cache: tuple[Tensor, ...],
    ) -> Tensor:
        """Store keys and values, then attend: [T, H * W]."""
        keys, values = cache
        write(keys, k_TGW, step.index)
        write(values, v_TGW, step.index)
        return cached_attention(q_TGRW, keys, values, index=step.index, softmax_scale=self.scale)


class LatentDecoder:
    """Multi-latent attention in its absorbed form: all heads share one key, also their value."""

    def __init__(self, attention: Any) -> None:
        config = attention.config
        self._attention = attention
        self._latent, self._rotary = config.kv_lora_rank, config.qk_pos_emb_head_dim
        self._heads = attention.num_attention_heads_per_partition
        self._content = config.qk_head_dim
        self.fields = [CacheField("latent", 1, self._latent + self._rotary)]
        self.scale = attention.softmax_scale
        has_query_latent = config.q_lora_rank is not None
        up = attention.linear_q_up_proj if has_query_latent else attention.linear_q_proj
        self._q_norm = norm_function(attention.q_layernorm if has_query_latent else None)
        self._kv_norm = norm_function(attention.kv_layernorm)
        self._q_up, self._proj = linear_function(up), linear_function(attention.linear_proj)
        up_HWC = attention.linear_kv_up_proj.weight.view(self._heads, -1, self._latent)
        self._k_up_HWC, self._v_up_HWC = up_HWC.split([self._content, config.v_head_dim], dim=1)

    def rotary(self, model: GPTModel, *, length: int, dtype: torch.dtype) -> Rotary | None:
        """The attention's own."""
        found = self._attention.rotary_pos_emb(length)
        angles, scale = found if isinstance(found, tuple) else (found, 1.0)
        return Rotary.of(angles, scale=scale, dtype=dtype)

    def __call__(self, x_TD: Tensor, step: StepTensors, cache: tuple[Tensor, ...]) -> Tensor:
        """See `AttentionDecoder`."""
        query_T1D, down_T1D = self._attention._qkv_down_projection(x_TD[:, None])
        if down_T1D.shape[-1] != self._latent + self._rotary:
            group = self._attention.tp_group
            down_T1D = gather_from_tensor_model_parallel_region(down_T1D, group=group)
        latent_TC, turned_TP = down_T1D[:, 0].split([self._latent, self._rotary], dim=-1)
        assert step.rotary is not None, "latent attention has rotary keys"
        turned_T11P = _rotate_pairs(turned_TP[:, None, None], step.rotary)
        key_T1K = torch.cat((self._kv_norm(latent_TC)[:, None], turned_T11P[:, 0]), dim=-1)
        q_THW = self._q_up(self._q_norm(query_T1D[:, 0])).view(len(x_TD), self._heads, -1)
        content_THW, turned_THP = q_THW.split([self._content, self._rotary], dim=-1)
        absorbed_THC = torch.einsum("thw,hwc->thc", content_THW, self._k_up_HWC)
        q_T1HK = torch.cat(
            (absorbed_THC[:, None], _rotate_pairs(turned_THP[:, None], step.rotary)), dim=-1
        )
        (latents,) = cache
        write(latents, key_T1K, step.index)
        out = cached_attention(q_T1HK, latents, latents, index=step.index, softmax_scale=self.scale)
        out_THC = out.view(len(x_TD), self._heads, -1)[..., : self._latent]
        return self._proj(torch.einsum("thc,hwc->thw", out_THC, self._v_up_HWC).flatten(1))


def rotate(x_TGHW: Tensor, rotary: Rotary) -> Tensor:
    """Rotary embedding (Su et al. 2021) of the first P widths, whose halves are pairs."""
    width = rotary.cos.shape[-1]
    turned = x_TGHW[..., :width]
    first, second = turned.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    turned = (turned * rotary.cos).add_(swapped.mul_(rotary.sin))
    if width == x_TGHW.shape[-1]:
        return turned
    return torch.cat((turned, x_TGHW[..., width:]), dim=-1)


def _rotate_pairs(x_TGHP: Tensor, rotary: Rotary) -> Tensor:
    """`rotate` of widths whose neighbours are pairs; they come out as halves."""
    return rotate(torch.cat((x_TGHP[..., 0::2], x_TGHP[..., 1::2]), dim=-1), rotary)


def _softmax_scale(attention: Any) -> float:
    """What the attention's core multiplies scores with."""
    config = attention.config
    scale = config.softmax_scale or attention.hidden_size_per_attention_head**-0.5
    return scale / (attention.layer_number if config.apply_query_key_layer_scaling else 1)


def linear_function(linear: Any, *, product: Product = plain_product) -> Function:
    """[T, in] -> [T, out], bias and tensor-parallel reduction included.

    product: of a weight and a bias with tokens.
    """
    kind = type(linear)  # exactly these: a subclass (an adapter) computes more
    if kind is ColumnParallelLinear and not linear.gather_output:
        return product(linear.weight, linear.bias)
    if kind is RowParallelLinear and linear.input_is_parallel:
        bias, group = linear.bias, linear.tp_group
        if group.size() == 1:
            return product(linear.weight, bias)
        multiply = product(linear.weight, None)

        def reduced(x: Tensor) -> Tensor:
            out = multiply(x)
            dist.all_reduce(out, group=group)
            return out if bias is None else out.add_(bias)

        return reduced
    return whole_module(linear)


def norm_function(norm: Any) -> Function:
    """[..., D] -> [..., D]."""
    if norm is None:
        return lambda x: x
    if type(norm) is RMSNorm and not norm.zero_centered and norm.weight.dtype == torch.float32:
        weight, eps, shape = norm.weight, norm.eps, norm.weight.shape
        return lambda x: F.rms_norm(x, shape, weight, eps)
    return norm


def whole_module(module: Any) -> Function:
    """A Megatron module of [T, 1, D] that returns its bias apart."""

    def run(x_TD: Tensor) -> Tensor:
        out, bias = module(x_TD[:, None])
        return out[:, 0] if bias is None else out[:, 0] + bias

    return run
