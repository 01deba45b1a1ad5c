"""Recomputation on CPU: each choice runs again what it names and leaves every gradient equal."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor, nn

from megatron_ext.upstream.arguments import parse
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.layout import Layout, open_layout
from megatron_ext.upstream.model import build_chunks
from tests.ranks import RankPool
from tests.upstream.cpu_runs import SMALL

DENSE = SMALL
EXPERTS = (
    f"{SMALL} --num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none "
    "--moe-shared-expert-intermediate-size 16"
)
LATENT = (
    f"{SMALL} --multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 8"
)
SELECTIVE = "--recompute-granularity selective --recompute-modules"
CASES = {
    "core_attn": (DENSE, f"{SELECTIVE} core_attn", "self_attention.core_attention"),
    "layernorm": (DENSE, f"{SELECTIVE} layernorm", "pre_mlp_layernorm"),
    "mlp": (DENSE, f"{SELECTIVE} mlp", "mlp.linear_fc1"),
    "core_attn layernorm mlp": (DENSE, f"{SELECTIVE} core_attn layernorm mlp", "mlp.linear_fc2"),
    "full": (
        DENSE,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "self_attention.linear_qkv",
    ),
    "moe": (EXPERTS, f"{SELECTIVE} moe", "mlp.router"),
    "shared_experts": (EXPERTS, f"{SELECTIVE} shared_experts", "mlp.shared_experts"),
    "experts' layernorm": (EXPERTS, f"{SELECTIVE} layernorm", "pre_mlp_layernorm"),
    "mla_up_proj": (LATENT, f"{SELECTIVE} mla_up_proj", "self_attention.linear_kv_up_proj"),
}
"""Model, flags, and a part of a layer that must run a second time."""


def calls_and_gradients(
    args: Namespace, layout: Layout, *, part: str, weights: dict[str, Tensor] | None = None
) -> tuple[int, dict[str, Tensor], dict[str, Tensor]]:
    """How often ``part`` of the first layer ran in a forward and backward, gradients, weights."""
    [chunk] = build_chunks(args, layout, wrap=False)
    if weights is not None:
        chunk.load_state_dict(weights)
    calls: list[str] = []
    module: nn.Module = chunk.decoder.layers[0].get_submodule(part)
    module.register_forward_pre_hook(lambda *_: calls.append(part))
    model_parallel_cuda_manual_seed(args.seed)  # the same dropout in both runs
    tokens = torch.arange(2 * 24).view(2, 24)
    positions = torch.arange(24).expand(2, 24)
    chunk(tokens, positions, None, labels=tokens + 1).mean().backward()
    gradients = {name: p.grad for name, p in chunk.named_parameters() if p.grad is not None}
    return len(calls), gradients, chunk.state_dict()


def compare(flags: str, *, recompute: str, part: str) -> tuple[int, int, dict[str, float]]:
    """Calls without and with recomputation; each gradient's difference relative to its largest."""
    flags = f"{flags} --attention-dropout 0.2 --hidden-dropout 0.2"
    with device_mode():
        args = parse(flags.split()).megatron
        layout = open_layout(args)
        once, kept, weights = calls_and_gradients(args, layout, part=part)
        args = parse([*flags.split(), *recompute.split()]).megatron
        twice, again, _ = calls_and_gradients(args, layout, part=part, weights=weights)
    assert kept.keys() == again.keys()
    moved = [name for name, gradient in kept.items() if gradient.abs().sum() > 0]
    difference = {
        name: float((kept[name] - again[name]).abs().max() / kept[name].abs().max())
        for name in moved
    }
    return once, twice, difference


@pytest.mark.parametrize("case", CASES)
def test_recomputation_leaves_gradients_equal(ranks: RankPool, case: str):
    flags, recompute, part = CASES[case]
    [(once, twice, difference)] = ranks(1).run(compare, flags, recompute=recompute, part=part)
    assert (once, twice) == (1, 2)
    assert len(difference) > 10
    # fp32: with its norm recomputed, a layer adds the gradients of its two branches in other order
    tolerance = 1e-6 if "layernorm" in case else 0.0
    assert max(difference.values()) <= tolerance, difference
