"""Log-probabilities of a converted checkpoint as its definition says, with absorbed attention.

The reference that a self-check compares a set-up with: one process, float32, one token after the
other of a short piece, the rest at once, against a cache of rotary keys and latents.
Not covered: mixture-of-experts layers.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from megatron_ext.mla.absorbed import LatentCache, absorbed_outputs
from megatron_ext.mla.decoder import DenseDecoder
from megatron_ext.mla.layers import LatentLayer
from megatron_ext.mla.read import read_latent_layer
from megatron_ext.weights.checks import open_checkpoint

_ONE_BY_ONE = 4
"""Tokens at the end of a sequence that are decoded one after the other."""


@torch.no_grad()
def written_out_logprobs(path: Path, tokens_BS: Tensor) -> Tensor:
    """log p(tokens[:, 1:]) in float32, [B, S - 1].

    Raises:
        ValueError: it is no converted checkpoint, or has experts.
    """
    source = open_checkpoint(path)
    if source.architecture.converted is None or source.architecture.experts is not None:
        raise ValueError(
            f"{path} is no dense converted checkpoint: its attention is not written out here."
        )
    decoder = DenseDecoder(source)
    hidden_BSD = decoder.embedded(tokens_BS)
    for number in range(source.architecture.num_layers):
        layer = read_latent_layer(source, number)
        x_BSD = decoder.inputs(number, hidden_BSD)
        outputs_BSD = torch.stack([_attended(layer, x_SD) for x_SD in x_BSD])
        hidden_BSD = decoder.advance(number, hidden_BSD, outputs_BSD)
    logprobs_BSV = decoder.logits(hidden_BSD[:, :-1]).log_softmax(-1)
    return logprobs_BSV.gather(-1, tokens_BS[:, 1:, None])[..., 0]


def _attended(layer: LatentLayer, x_SD: Tensor) -> Tensor:
    cache, found = LatentCache.empty(layer), []
    whole = max(len(x_SD) - _ONE_BY_ONE, 0)
    for piece_TD in (x_SD[:whole], *x_SD[whole:].split(1)):
        cache = cache.appended(layer, piece_TD)
        found.append(absorbed_outputs(layer, cache, piece_TD) @ layer.output_DHV.flatten(1).T)
    out_SD = torch.cat(found)
    return out_SD if layer.output_bias_D is None else out_SD + layer.output_bias_D
