"""What a rank does in the tests of converted attention."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ext.upstream.arguments import parse
from megatron_ext.upstream.checkpoint import load_weights, save_weights
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.layout import open_layout
from megatron_ext.upstream.mla_attention import ConvertedAttention
from megatron_ext.upstream.mla_parts import LatentShape
from megatron_ext.upstream.model import bare, build_chunks, build_trainable
from megatron_ext.upstream.step import build_stepper
from megatron_ext.weights.checks import open_checkpoint
from tests.upstream.hf_jobs import parse as parse_checkpoint
from tests.upstream.jobs import fixed_batch, forward_backward, save_gradients


def save_random(flags: list[str], latent: LatentShape, folder: Path) -> None:
    """Weights and frequencies of a converted model, none of them trivial."""
    with device_mode():
        options = parse(flags)
        layout = open_layout(options.megatron)
        chunks = build_chunks(options.megatron, layout, wrap=False, latent=latent)
        draw = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in chunks[0].parameters():
                parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.05)
        for module in attentions(chunks):
            frequencies = torch.rand(module.frequency_bits.shape, generator=draw)
            module.frequency_bits.copy_(frequencies.view(torch.int32))
        save_weights([bare(chunk) for chunk in chunks], layout, folder=folder)


def attentions(chunks: list[Any]) -> list[ConvertedAttention]:
    """The attention modules of this rank's chunks."""
    return [layer.self_attention for chunk in chunks for layer in bare(chunk).decoder.layers]


def step_gradients(
    flags: list[str], latent: LatentShape, initial: Path, out: Path
) -> tuple[float, list[Tensor]]:
    """The loss of the fixed batch, whose gradients go to a folder; the frequencies as loaded."""
    with device_mode():
        options = parse(flags)
        layout = open_layout(options.megatron)
        model = build_trainable(options.megatron, layout, latent=latent)
        load_weights(model.bare_chunks, layout, folder=initial)
        model.optimizer.reload_model_params()
        stepper = build_stepper(options, model=model, layout=layout)
        loss = forward_backward(options, stepper, fixed_batch())
        save_gradients(model, layout, out)
        return loss, [module.frequencies().clone() for module in attentions(model.chunks)]


def shapes_of(folders: Mapping[str, Path]) -> dict[str, LatentShape | None]:
    """What the arguments of converted checkpoints say of their attention."""
    with device_mode():
        return {
            name: LatentShape.of_arguments(parse_checkpoint([], open_checkpoint(folder), {}))
            for name, folder in folders.items()
        }
