"""Attention with RoPE as its sentences say it: one head, one pair, one query at a time; float64.

The original layer (with pairs that stand still, where asked) and the converted one, not absorbed
and absorbed.  Nothing here imports the code it checks; only the data types are shared.

Legend: T tokens, D model, H query heads, G KV heads, P pairs; weights are (out, in).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_ext.mla.layers import LatentLayer
from megatron_ext.weights.architecture import Architecture, Rope

MODELS: dict[str, dict[str, Any]] = {
    "mha": {"num_groups": 4},
    "gqa": {"num_groups": 2},
    "mqa": {"num_groups": 1},
    "biased": {"num_groups": 2, "qkv_bias": True, "output_bias": True},
    "biased mqa": {"num_groups": 1, "qkv_bias": True},
    "llama3": {
        "num_groups": 2,
        "rope": Rope(kind="llama3", theta=5e5, factor=8.0, original_positions=64),
    },
    "yarn": {
        "num_groups": 2,
        "qkv_bias": True,
        "rope": Rope(kind="yarn", factor=4.0, original_positions=16),
    },
    "half rotary, interleaved": {
        "num_groups": 2,
        "rope": Rope(theta=100.0, rotated_share=0.5, is_interleaved=True),
    },
    "normed": {"num_groups": 2, "qk_norm": True},
}


def architecture(name: str = "gqa", **changes: Any) -> Architecture:
    """A tiny decoder; heads are wider than hidden / heads."""
    sizes: dict[str, Any] = {
        "family": "llama",
        "num_layers": 1,
        "hidden_size": 40,
        "ffn_size": 8,
        "num_heads": 4,
        "head_size": 12,
        "vocab_size": 8,
        "max_positions": 64,
        "norm_epsilon": 1e-5,
        "activation": "silu",
        "tied": False,
        "rope": Rope(theta=100.0),
    }
    return Architecture(**(sizes | MODELS[name] | changes))


def random_tensors(shape: Architecture, *, seed: int = 0) -> dict[str, Tensor]:
    """A layer's tensors by their names in `self_attn`, large enough for logits of about 1."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=draw, dtype=torch.float64)

    query, key = shape.num_heads * shape.head_size, shape.num_groups * shape.head_size
    size = shape.hidden_size
    tensors = {
        "q_proj.weight": normal(query, size) * 1.2 / size**0.5,
        "k_proj.weight": normal(key, size) * 1.2 / size**0.5,
        "v_proj.weight": normal(key, size) / size**0.5,
        "o_proj.weight": normal(size, query) / query**0.5,
    }
    if shape.qkv_bias:
        tensors |= {f"{n}_proj.bias": normal(query if n == "q" else key) for n in "qkv"}
    if shape.output_bias:
        tensors["o_proj.bias"] = normal(size)
    if shape.qk_norm:
        tensors |= {f"{n}_norm.weight": normal(shape.head_size).abs() + 0.5 for n in "qk"}
    return tensors


def random_inputs(shape: Architecture, *, tokens: int = 14, seed: int = 1) -> Tensor:
    """Hidden states [T, D] with a few large directions and a large first token."""
    draw = torch.Generator().manual_seed(seed)
    scale_D = torch.logspace(0.5, -1, shape.hidden_size, dtype=torch.float64)
    x_TD = torch.randn(tokens, shape.hidden_size, generator=draw, dtype=torch.float64) * scale_D
    x_TD[0] = 3 * x_TD[0]
    return x_TD


def original_attention(
    tensors: Mapping[str, Tensor],
    shape: Architecture,
    x_TD: Tensor,
    *,
    frequencies_P: Tensor,
    rotary_scale: float = 1.0,
    turns_GP: Tensor | None = None,
    factor_HP: Tensor | None = None,
) -> Tensor:
    """Output [T, D] of the layer.

    turns_GP: whether a pair turns; the others keep angle 0.  None = all turn.
    factor_HP: complex factors of queries of pairs that do not turn; None = 1.
    """
    width = shape.head_size
    q_THW, k_TGW, v_TGW = (_heads(tensors, x_TD, name, width) for name in "qkv")
    if shape.qk_norm:
        q_THW = _normed(q_THW, tensors["q_norm.weight"], shape.norm_epsilon)
        k_TGW = _normed(k_TGW, tensors["k_norm.weight"], shape.norm_epsilon)
    outputs = []
    for head in range(shape.num_heads):
        group = head // (shape.num_heads // shape.num_groups)
        q_TW, k_TW = q_THW[:, head].clone(), k_TGW[:, group].clone()
        for pair, frequency in enumerate(frequencies_P.tolist()):
            is_turned = turns_GP is None or bool(turns_GP[group, pair])
            a, b = _widths(shape, pair, count=len(frequencies_P))
            angle_T = torch.arange(len(x_TD)).double() * (frequency if is_turned else 0.0)
            turn_T = torch.exp(1j * angle_T)
            for x_TW in (q_TW, k_TW):
                x_T = (x_TW[:, a] + 1j * x_TW[:, b]) * rotary_scale * turn_T
                if x_TW is q_TW and not is_turned and factor_HP is not None:
                    x_T = x_T * factor_HP[head, pair].conj()
                x_TW[:, a], x_TW[:, b] = x_T.real, x_T.imag
        outputs.append(causal_head(q_TW, k_TW, v_TGW[:, group], scale=width**-0.5))
    out_TD = torch.cat(outputs, dim=1) @ tensors["o_proj.weight"].T
    return out_TD + tensors.get("o_proj.bias", 0.0)


def _heads(tensors: Mapping[str, Tensor], x_TD: Tensor, name: str, width: int) -> Tensor:
    out = x_TD @ tensors[f"{name}_proj.weight"].T + tensors.get(f"{name}_proj.bias", 0.0)
    return out.view(len(x_TD), -1, width)


def _normed(x: Tensor, weight_W: Tensor, epsilon: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight_W


def _widths(shape: Architecture, pair: int, *, count: int) -> tuple[int, int]:
    return (2 * pair, 2 * pair + 1) if shape.rope.is_interleaved else (pair, pair + count)


def causal_head(q_TX: Tensor, k_TX: Tensor, v_TV: Tensor, *, scale: float) -> Tensor:
    """Softmax attention [T, V] of one head, query by query."""
    rows = []
    for t in range(len(q_TX)):
        weights = torch.softmax(k_TX[: t + 1] @ q_TX[t] * scale, dim=0)
        rows.append(weights @ v_TV[: t + 1])
    return torch.stack(rows)


def latent_attention(layer: LatentLayer, x_TD: Tensor, *, is_absorbed: bool = False) -> Tensor:
    """Output [T, D] of a converted layer.

    is_absorbed: attend to the latent itself, keys and values never made; with norms the divisor of
    each KV head's key is cached beside it.
    """
    queried = x_TD if layer.query_down_ED is None else x_TD @ layer.query_down_ED.T
    latent_TR = x_TD @ layer.down_RD.T
    num_heads, groups = len(layer.query_plain_HNE), len(layer.key_up_GNR)
    out_TD = torch.zeros_like(x_TD)
    for head in range(num_heads):
        group = head // (num_heads // groups)
        key = head // (num_heads // len(layer.key_rotary_BCD))
        q_rotary = queried @ layer.query_rotary_HCE[head].T + _row(layer.query_rotary_bias_HC, head)
        q_plain = queried @ layer.query_plain_HNE[head].T + _row(layer.query_plain_bias_HN, head)
        k_rotary = x_TD @ layer.key_rotary_BCD[key].T + _row(layer.key_rotary_bias_BC, key)
        k_plain = latent_TR @ layer.key_up_GNR[group].T
        divisor_T1 = torch.ones(len(x_TD), 1, dtype=x_TD.dtype)
        up_NR = layer.key_up_GNR[group]
        if layer.norms is not None:
            n = layer.norms
            size_T1 = _size(q_rotary, q_plain, n.epsilon)
            q_rotary = q_rotary / size_T1 * n.query_rotary_GC[group]
            q_plain = q_plain / size_T1 * n.query_plain_GN[group]
            divisor_T1 = _size(k_rotary, k_plain, n.epsilon)
            k_rotary = k_rotary / divisor_T1 * n.key_rotary_GC[group]
            k_plain = k_plain / divisor_T1 * n.key_plain_GN[group]
            up_NR = n.key_plain_GN[group][:, None] * up_NR
        frequencies_K = layer.frequencies_BK[key]
        q_rotary, k_rotary = (_turned(x, frequencies_K) for x in (q_rotary, k_rotary))
        value_VR = layer.value_up_GVR[group]
        if is_absorbed:
            q_TX = torch.cat((q_rotary, q_plain @ up_NR), dim=1)
            k_TX = torch.cat((k_rotary, latent_TR / divisor_T1), dim=1)
            seen_TR = causal_head(q_TX, k_TX, latent_TR, scale=layer.softmax_scale)
            out_TV = seen_TR @ value_VR.T
        else:
            q_TX, k_TX = torch.cat((q_rotary, q_plain), 1), torch.cat((k_rotary, k_plain), 1)
            out_TV = causal_head(q_TX, k_TX, latent_TR @ value_VR.T, scale=layer.softmax_scale)
        out_TD = out_TD + out_TV @ layer.output_DHV[:, head].T
    return out_TD + (0.0 if layer.output_bias_D is None else layer.output_bias_D)


def _row(bias: Tensor | None, index: int) -> Tensor | float:
    return 0.0 if bias is None else bias[index]


def _size(rotary_TC: Tensor, plain_TN: Tensor, epsilon: float) -> Tensor:
    """Root mean square [T, 1] of a head."""
    return (torch.cat((rotary_TC, plain_TN), 1).square().mean(-1, keepdim=True) + epsilon).sqrt()


def _turned(x_TC: Tensor, frequencies_K: Tensor) -> Tensor:
    count, out_TC = len(frequencies_K), x_TC.clone()
    times_T = torch.arange(len(x_TC), dtype=x_TC.dtype)
    for pair, frequency in enumerate(frequencies_K.tolist()):
        c_T, s_T = (times_T * frequency).cos(), (times_T * frequency).sin()
        real_T, imaginary_T = x_TC[:, pair], x_TC[:, pair + count]
        out_TC[:, pair] = real_T * c_T - imaginary_T * s_T
        out_TC[:, pair + count] = imaginary_T * c_T + real_T * s_T
    return out_TC
