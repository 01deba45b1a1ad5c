"""Our modules in Megatron's slots: Megatron's own layer specs with the torch parts replaced.

Experts never see padding (moe.py).  Without Transformer Engine the norms become ones that sequence
parallelism can use and the core attention one that takes packed rows; everything else, and the
checkpoint keys, stay Megatron's.
"""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.training.models import GPTModelConfig

from megatron_ext.parallel.norm import SequenceParallelNorm
from megatron_ext.upstream.attention import SegmentAttention
from megatron_ext.upstream.latent_attention import use_latent_attention
from megatron_ext.upstream.mla_attention import use_converted_attention
from megatron_ext.upstream.mla_parts import LatentShape
from megatron_ext.upstream.moe import route_real_tokens

_OURS = {WrappedTorchNorm: SequenceParallelNorm, DotProductAttention: SegmentAttention}


def _replace_torch_parts(submodules: object) -> None:
    for name, slot in vars(submodules).items():
        if isinstance(slot, type) and slot in _OURS:
            setattr(submodules, name, _OURS[slot])


def block_spec(
    config: GPTModelConfig, vp_stage: int | None = None, *, latent: LatentShape | None = None
) -> TransformerBlockSubmodules:
    """The decoder layers of one pipeline chunk, dense or mixture-of-experts.

    latent: sizes of attention converted by `megatron_ext.mla`; None = Megatron's.
    """
    transformer = config.transformer
    use_te = transformer.transformer_impl == "transformer_engine"
    spec = get_gpt_decoder_block_spec(
        transformer,
        use_transformer_engine=use_te,
        normalization=transformer.normalization,
        qk_l2_norm=transformer.qk_l2_norm,
        vp_stage=vp_stage,
    )
    for layer in spec.layer_specs:
        route_real_tokens(layer.submodules)
    if use_te:
        if latent is not None:
            raise ValueError(
                "converted attention is built from the local layer spec: use --transformer-impl "
                "local."
            )
        return spec
    for layer in spec.layer_specs:
        assert isinstance(layer, ModuleSpec), "Megatron's local layer spec is a ModuleSpec"
        _replace_torch_parts(layer.submodules)
        _replace_torch_parts(layer.submodules.self_attention.submodules)
        use_latent_attention(layer)
        if latent is not None:
            use_converted_attention(layer, latent)
    spec.layer_norm = SequenceParallelNorm
    return spec
