"""Absorbed attention equals keys and values made out, however tokens come; its cache (E6, E8)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ext.mla.absorbed import LatentCache, absorbed_outputs
from megatron_ext.mla.layers import LatentLayer
from megatron_ext.mla.refit import latent_outputs
from megatron_ext.mla.sizes import cache_of
from tests.mla.cases import PLAIN, Case
from tests.mla.reference import latent_attention, random_inputs

CLOSE = {"rtol": 0, "atol": 1e-10}
"""float64; only the order of products differs."""
LAYERS = {
    **{f"paper {n}": n for n in ("mha", "gqa", "mqa", "biased", "yarn", "normed")},
    "paper half rotary": "half rotary, interleaved",
    **{f"deepseek {n}": n for n in ("gqa", "mqa", "biased", "llama3")},
    "paper queries from a latent": "biased",
    "paper no pair": "normed",
    "paper all pairs": "normed",
}
PIECES = {
    "at once": [14],
    "token by token": [1] * 14,
    "by three": [3, 3, 3, 3, 2],
    "mixed": [5, 1, 1, 4, 2, 1],
}


@cache
def converted(name: str) -> tuple[LatentLayer, Tensor]:
    """A layer of truncated keys and values, and a sequence; the same to all tests."""
    case = Case(LAYERS[name])
    layout = "deepseek" if name.startswith("deepseek") else "paper"
    pairs = {"paper no pair": 0, "paper all pairs": case.pairs.count}.get(name, 2)
    config = replace(PLAIN, mla_layout=layout, rope_stride=1, rope_pairs=pairs)
    if name == "paper queries from a latent":
        config = replace(config, q_rank=9)
    return case.convert(config, rank=10), case.x_TD


def outputs_by_pieces(layer: LatentLayer, x_TD: Tensor, sizes: list[int]) -> Tensor:
    kept, outputs = LatentCache.empty(layer), []
    for new_TD in x_TD.split(sizes):
        kept = kept.appended(layer, new_TD)
        outputs.append(absorbed_outputs(layer, kept, new_TD))
    return torch.cat(outputs)


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("name", LAYERS)
def test_absorbed_is_what_is_made_out(name, pieces):
    layer, x_TD = converted(name)
    got_TO = outputs_by_pieces(layer, x_TD, PIECES[pieces])
    torch.testing.assert_close(got_TO, latent_outputs(layer, x_TD), **CLOSE)
    out_TD = got_TO @ layer.output_DHV.flatten(1).T
    out_TD = out_TD if layer.output_bias_D is None else out_TD + layer.output_bias_D
    torch.testing.assert_close(out_TD, latent_attention(layer, x_TD), **CLOSE)


@pytest.mark.parametrize("name", LAYERS)
def test_the_cache_has_the_size_that_is_stated(name):
    layer, x_TD = converted(name)
    for dtype, width in ((torch.float64, 8), (torch.bfloat16, 2)):
        kept = LatentCache.empty(layer.to(dtype)).appended(layer.to(dtype), x_TD.to(dtype))
        assert sum(t.numel() for t in kept.tensors) == cache_of(layer).total * len(x_TD)
        stated = cache_of(layer).num_bytes(tp_size=1, num_layers=1, bytes_per_number=width)
        assert sum(t.nbytes for t in kept.tensors) == stated * len(x_TD)
    assert len(kept.tensors) == (2 if layer.norms is None else 3)


@pytest.mark.parametrize("name", ["paper gqa", "paper normed", "deepseek biased"])
def test_a_cache_is_a_value(name):
    """Two continuations of one prefix, in turn, and a prefix cut from a longer cache."""
    layer, x_TD = converted(name)
    other_TD = torch.cat((x_TD[:6], random_inputs(Case("gqa").shape, seed=9)[:4]))
    prefix = LatentCache.empty(layer).appended(layer, x_TD[:6])
    first = prefix.appended(layer, x_TD[6:7])
    second = prefix.appended(layer, other_TD[6:])
    first = first.appended(layer, x_TD[7:])
    for kept, sequence_TD in ((first, x_TD), (second, other_TD)):
        expected = latent_outputs(layer, sequence_TD)[6:]
        got = absorbed_outputs(layer, kept, sequence_TD[6:])
        torch.testing.assert_close(got, expected, **CLOSE)
    cut = second.first(6).appended(layer, x_TD[6:])
    for left, right in zip(cut.tensors, first.tensors, strict=True):
        torch.testing.assert_close(left, right, **CLOSE)


def test_divisors_are_those_of_whole_keys():
    """Negative control: without a divisor, or with one of rotary widths, attention is another."""
    layer, x_TD = converted("paper normed")
    expected = latent_outputs(layer, x_TD)
    kept = LatentCache.empty(layer).appended(layer, x_TD)
    assert kept.divisor_GS is not None and layer.norms is not None
    rotary_GSC = kept.key_rotary_BSC / layer.norms.key_rotary_GC.abs().mean()
    wrong = {
        "none": None,
        "of rotary keys": (rotary_GSC * kept.divisor_GS[..., None]).square().mean(-1).sqrt(),
        "of another KV head": kept.divisor_GS.flip(0),
        "of another token": kept.divisor_GS.roll(1, dims=1),
    }
    for name, divisor_GS in wrong.items():
        got = absorbed_outputs(layer, replace(kept, divisor_GS=divisor_GS), x_TD)
        assert (got - expected).abs().max() > 1e-2, name


class LargestTensor(TorchDispatchMode):
    """Watches every operation and keeps the largest output, in numbers."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.numbers = max(self.numbers, *sizes, 0)
        return result


@pytest.mark.parametrize("name", ["mha", "gqa", "normed"])
def test_no_merged_weights_are_made(name):
    """A latent wider than a head: U_k^T W_q and W_o U_v would be the largest tensors of all."""
    case = Case(name)
    layer = case.convert(replace(PLAIN, rope_pairs=2), rank=24)
    heads, size = case.shape.num_heads, case.shape.hidden_size
    merged = heads * layer.rank * size
    kept = LatentCache.empty(layer).appended(layer, case.x_TD[:-1])
    with LargestTensor() as largest:
        kept = kept.appended(layer, case.x_TD[-1:])
        absorbed_outputs(layer, kept, case.x_TD[-1:])
    weights = max(t.numel() for t in vars(layer).values() if isinstance(t, Tensor))
    assert largest.numbers <= weights < merged
    up_HNR = layer.key_up_GNR.repeat_interleave(case.layer.heads_per_group, 0)
    with LargestTensor() as largest:  # the watch sees them where they are made
        torch.einsum("hnr,hnd->hrd", up_HNR, layer.query_plain_HNE)
    assert largest.numbers == merged
