"""A step of decoding through Megatron's transformer layers.

Megatron's layer costs some 300 microseconds of Python, as much as the arithmetic of a small model.
So where a layer is made of parts we know, its submodules' weights are used in the same order of
operations, tensor-parallel reductions included; any other layer runs as it is, with the cache in
the place of its core attention.  Invariant the tests check: both ways give the same numbers.

Legend: T tokens of a step, D model, G key/value heads and R query heads of each on this rank, W
width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from megatron_ext.upstream.decode_attention import (
    AttentionDecoder,
    Product,
    StepTensors,
    attention_decoder,
    linear_function,
    norm_function,
    whole_module,
)
from megatron_ext.upstream.decode_product import Function, plain_product

LayerFunction = Callable[[Tensor, StepTensors, tuple[Tensor, ...]], Tensor]
"""(hidden states [T, D], step, the layer's part of the cache) -> hidden states [T, D]."""


def layer_function(layer: Any, *, product: Product = plain_product) -> LayerFunction:
    """The fastest way we know through a layer; holds its parameters: build it for each rollout.

    product: of the weights of a dense MLP, the largest there are.
    """
    return _by_parts(layer, product) if is_known(layer) else layer_as_it_is(layer)


def is_known(layer: Any) -> bool:
    """Whether a layer is made of parts that can run one by one."""
    attention, config = layer.self_attention, layer.config
    is_plain_layer = (
        type(layer) is TransformerLayer
        and isinstance(layer.pre_cross_attn_layernorm, IdentityOp)
        and isinstance(layer.cross_attention, IdentityOp)
        and isinstance(layer.cross_attn_bda, IdentityFuncOp)
        and not config.fp32_residual_connection
        and not (config.fp8 or config.fp4)
    )
    if type(attention) is not SelfAttention:
        return is_plain_layer and not isinstance(attention, SelfAttention)
    return (
        is_plain_layer
        and not config.attention_output_gate
        and not config.rotary_interleaved
        and not config.no_rope_freq
        and config.num_query_groups >= attention.pg_collection.tp.size()
    )


def _by_parts(layer: Any, product: Product) -> LayerFunction:
    attend = _decoder_of(layer)
    input_norm = norm_function(layer.input_layernorm)
    mlp_norm, mlp = norm_function(layer.pre_mlp_layernorm), _mlp_function(layer.mlp, product)

    def run(x_TD: Tensor, step: StepTensors, cache: tuple[Tensor, ...]) -> Tensor:
        x_TD = attend(input_norm(x_TD), step, cache).add_(x_TD)
        return mlp(mlp_norm(x_TD)).add_(x_TD)

    return run


def layer_as_it_is(layer: Any) -> LayerFunction:
    """Megatron's own forward of a layer, with the cache in the place of its core attention, or,
    where the attention is not one that keeps keys and values, of the whole attention."""
    trained, attend = layer.self_attention, _decoder_of(layer)
    keeps_keys = isinstance(trained, SelfAttention)

    def run(x_TD: Tensor, step: StepTensors, cache: tuple[Tensor, ...]) -> Tensor:
        core = trained.core_attention
        if keeps_keys:
            trained.core_attention = _CachedCore(attend, step, cache)
        else:
            layer.self_attention = _CachedAttention(attend, step, cache)
        try:
            angles = None if step.rotary is None else step.rotary.angles
            out, _ = layer(hidden_states=x_TD[:, None], attention_mask=None, rotary_pos_emb=angles)
        finally:
            trained.core_attention, layer.self_attention = core, trained
        return out[:, 0]

    return run


def _decoder_of(layer: Any) -> AttentionDecoder:
    found = attention_decoder(layer.self_attention)
    assert found is not None, "refuse_undecodable comes first"
    return found


class _CachedCore(nn.Module):
    """In the place of a core attention for one step: [T, 1, H, W] queries -> [T, 1, H * W]."""

    def __init__(self, decoder: Any, step: StepTensors, cache: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.decoder, self.step, self.cache = decoder, step, cache

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Attend to the cache, the step's own keys and values included."""
        q_TGRW = query[:, 0].unflatten(1, (key.shape[2], -1))
        return self.decoder.attend(q_TGRW, key[:, 0], value[:, 0], self.step, self.cache)[:, None]


class _CachedAttention(nn.Module):
    """In the place of an attention for one step: [T, 1, D] hidden states -> the same, no bias."""

    def __init__(
        self, attend: AttentionDecoder, step: StepTensors, cache: tuple[Tensor, ...]
    ) -> None:
        super().__init__()
        self.attend, self.step, self.cache = attend, step, cache

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """Attend by the decoder."""
        return self.attend(hidden_states[:, 0], self.step, self.cache)[:, None], None


def _mlp_function(mlp: Any, product: Product) -> Function:
    """A dense MLP by its parts, anything else (experts) as it is."""
    config = mlp.config
    is_plain = (
        type(mlp) is MLP
        and not config.use_te_activation_func
        and not config.bias_activation_fusion
        and config.activation_func_clamp_value is None
        and not config.glu_linear_offset
    )
    if not is_plain:
        return whole_module(mlp)
    up, down = (linear_function(x, product=product) for x in (mlp.linear_fc1, mlp.linear_fc2))
    activation = config.activation_func
    if not config.gated_linear_unit:
        return lambda x_TD: down(activation(up(x_TD)))

    def gated(x_TD: Tensor) -> Tensor:
        gate, linear = up(x_TD).chunk(2, dim=-1)
        return down(activation(gate).mul_(linear))

    return gated
