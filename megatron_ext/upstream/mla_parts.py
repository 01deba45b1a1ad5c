"""Sizes and parts of converted attention that Megatron's configuration and modules do not have.

Legend: as in `mla_attention`.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_ext.weights.architecture import Converted


@dataclass(frozen=True, kw_only=True)
class LatentShape(Converted):
    """All of converted attention that Megatron's configuration does not have."""

    has_query_bias: bool = False
    has_key_rotary_bias: bool = False
    has_output_bias: bool = False
    has_norms: bool = False
    """Queries and keys are normalised before RoPE (layout `paper` only)."""
    softmax_scale: float = 0.0
    """Factor on the logits; 0 = one over the root of the original width of a head."""

    @classmethod
    def of_arguments(cls, args: Namespace) -> LatentShape | None:
        """Of the model that parsed arguments describe; None = its attention is not converted.

        Biases and norms of the original attention have their place in the converted one.
        """
        if args.latent_layout == "none":
            return None
        sizes = {
            "layout": args.latent_layout,
            "num_pairs": args.latent_pairs,
            "rank": args.latent_rank,
            "query_rank": args.latent_query_rank,
        }
        return cls(
            **sizes,
            has_query_bias=args.add_qkv_bias,
            has_key_rotary_bias=args.add_qkv_bias,
            has_output_bias=args.add_qkv_bias or args.add_bias_linear,
            has_norms=args.qk_layernorm,
            softmax_scale=Converted(**sizes).query_scale(args.kv_channels),
        )


class SharedLinear(torch.nn.Module):
    """A linear layer whose whole weight is on every tensor-parallel rank.

    Under sequence parallelism each rank sees its share of the positions, and Megatron sums the
    gradients of parameters with the mark ``sequence_parallel``.
    """

    def __init__(self, size_in: int, size_out: int, config: TransformerConfig) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.empty(size_out, size_in, dtype=config.params_dtype, device=device)
        )
        if config.perform_initialization:
            config.init_method(self.weight)
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """[..., size_in] to [..., size_out]."""
        return F.linear(x, self.weight)


def with_widths(
    submodules: SelfAttentionSubmodules,
    config: TransformerConfig,
    latent: LatentShape,
    *,
    key_width: int,
) -> Any:
    """What `Attention` builds by itself, with our widths, scale and output bias."""
    core, proj = submodules.core_attention, submodules.linear_proj
    scale = latent.softmax_scale or (config.kv_channels or 1) ** -0.5
    widths = {"k_channels": key_width, "v_channels": config.kv_channels, "softmax_scale": scale}
    has_bias = config.add_bias_linear or latent.has_output_bias

    def build_core(**given: Any) -> Any:
        return core(**(given | widths))

    def build_proj(*sizes: int, **given: Any) -> Any:
        return proj(*sizes, **(given | {"bias": has_bias}))

    return SelfAttentionSubmodules(
        linear_qkv=submodules.linear_qkv, core_attention=build_core, linear_proj=build_proj
    )
