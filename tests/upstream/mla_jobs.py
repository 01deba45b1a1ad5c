"""What a rank does in the tests of converted attention."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_ext.mla.config import MLAConfig
from megatron_ext.mla.convert import convert_layer
from megatron_ext.mla.layers import AttentionLayer, LatentLayer
from megatron_ext.mla.statistics import sequence_statistics
from megatron_ext.upstream.arguments import parse
from megatron_ext.upstream.checkpoint import load_weights, save_weights
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.layout import open_layout
from megatron_ext.upstream.mla_attention import ConvertedAttention
from megatron_ext.upstream.mla_parts import LatentShape
from megatron_ext.upstream.mla_weights import load_layer
from megatron_ext.upstream.model import bare, build_chunks, build_trainable
from megatron_ext.upstream.step import build_stepper
from megatron_ext.weights.architecture import Architecture
from megatron_ext.weights.checks import open_checkpoint
from tests.upstream.hf_jobs import Job
from tests.upstream.hf_jobs import parse as parse_checkpoint
from tests.upstream.jobs import fixed_batch, forward_backward, save_gradients


def converted_layers(
    folder: Path, architecture: Architecture, config: MLAConfig, *, rank: int
) -> list[LatentLayer]:
    """Every layer of a Hugging Face folder; what calibration there is, is on random inputs."""
    tensors = load_file(folder / "model.safetensors")
    found = []
    for number in range(architecture.num_layers):
        prefix = f"model.layers.{number}.self_attn."
        own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        layer = AttentionLayer.of(own, architecture, dtype=torch.float64)
        statistics = None
        if config.needs_statistics:
            draw = torch.Generator().manual_seed(number)
            size = 24, architecture.hidden_size
            x_TD = torch.randn(size, generator=draw, dtype=torch.float64)
            statistics = sequence_statistics(layer, x_TD)
        converted, _ = convert_layer(layer, config=config, rank=rank, statistics=statistics)
        found.append(converted.to(torch.float32))
    return found


def logits_pairs(
    folders: Mapping[str, Path], flags: str, tokens: Tensor, configs: Mapping[str, MLAConfig]
) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    """For every checkpoint the logits of Megatron's model and of its full-rank conversion."""
    job, found = Job(flags), {}
    with device_mode(), torch.no_grad():
        for name, folder in folders.items():
            checkpoint, originals = job.filled(folder)
            shape, config = checkpoint.architecture, configs[name]
            kept = 2 * config.rope_pairs if config.mla_layout == "paper" else 0
            rank = min(shape.hidden_size, shape.num_groups * (2 * shape.head_size - kept))
            layers = converted_layers(folder, shape, config, rank=rank)
            latent = LatentShape.of(layers[0], layout=config.mla_layout)
            args = parse_checkpoint(job.flags, checkpoint, {})
            chunks = build_chunks(args, job.layout, wrap=False, latent=latent)
            for old, new in zip(originals, chunks, strict=True):
                copy_all_but_attention(bare(old.eval()), bare(new.eval()), layers)
            found[name] = job.logits(originals, tokens), job.logits(chunks, tokens)
    return found


def copy_all_but_attention(old: Any, new: Any, layers: list[LatentLayer]) -> None:
    """Weights that both have, and the converted layers."""
    state = {n: t for n, t in old.state_dict().items() if ".self_attention." not in n}
    missing, extra = new.load_state_dict(state, strict=False)
    assert not extra and all(".self_attention." in name for name in missing)
    for layer in new.decoder.layers:
        load_layer(layer.self_attention, layers[layer.layer_number - 1])


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
