"""What users of other converters ran into does not happen here.

The table "Known bugs of other converters" of docs/mha2mla.md has every complaint and its test;
those that no other file of this folder tests are here, by the number or letter of the table.  The
original is the attention of transformers where families differ.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.mla.convert import convert_layer, split_layer
from megatron_ext.mla.forward import project
from megatron_ext.mla.latent import compress
from megatron_ext.mla.layers import AttentionLayer, LatentLayer
from megatron_ext.mla.low_rank import factorise
from megatron_ext.mla.presets import preset
from megatron_ext.mla.problems import conversion_notices, conversion_problems
from megatron_ext.mla.sizes import cache_of
from megatron_ext.weights.families import architecture_of
from tests.mla.cases import EXACT, PLAIN, Case
from tests.mla.reference import architecture, latent_attention, random_inputs
from tests.rules import imports, is_in
from tests.weights.tiny_models import LLAMA3, Tiny, build

ROOT = Path(__file__).resolve().parents[2]
HIGH = replace(PLAIN, rope_strategy="high")
CLOSE = {"rtol": 0, "atol": 1e-5}
"""transformers rounds norms and softmax to float32."""
FAMILIES = {
    "4: Qwen2 and its biases": Tiny(family="qwen2", config={}),
    "8, 22, a: Qwen3 normalises before RoPE": Tiny(family="qwen3", config={"head_dim": 12}),
    "a: Qwen3-MoE": Tiny(
        family="qwen3_moe",
        config={"head_dim": 12, "num_experts": 2, "moe_intermediate_size": 16},
    ),
    "17: Llama 3.2, scaled frequencies, tied, four heads a group": Tiny(
        family="llama",
        config={
            "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64},
            "head_dim": 24,
            "num_attention_heads": 8,
            "tie_word_embeddings": True,
        },
    ),
    "20: Qwen2.5-7B, seven heads a group": Tiny(
        family="qwen2", config={"hidden_size": 56, "num_attention_heads": 14}
    ),
    "e: Mistral-Nemo, heads of their own size": Tiny(
        family="mistral", config={"head_dim": 20, "sliding_window": None}
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_what_transformers_computes(name):
    """All pairs kept is the model; of half of them, transformers with those frequencies at zero."""
    model = build(FAMILIES[name])
    shape, attention = architecture_of(model.config.to_dict()), model.model.layers[0].self_attn
    with torch.no_grad():
        if shape.qkv_bias:
            attention.k_proj.bias.mul_(30)  # Qwen2's are huge
    layer = AttentionLayer.of(attention.state_dict(), shape, dtype=torch.float64)
    x_TD = random_inputs(shape, tokens=20)
    for kept in (layer.pairs.count, layer.pairs.count // 2):
        config = replace(HIGH, rope_pairs=kept)
        rank = min(shape.hidden_size, shape.num_groups * 2 * (shape.head_size - kept))
        converted, _ = convert_layer(layer, config=config, rank=rank)
        model.model.rotary_emb.inv_freq[kept:] = 0
        expected_TD = attention_of_transformers(model, x_TD)
        torch.testing.assert_close(latent_attention(converted, x_TD), expected_TD, **CLOSE)


def attention_of_transformers(model: Any, x_TD: Tensor) -> Tensor:
    """Output of the first layer's attention for normalised inputs."""
    tokens, x = len(x_TD), x_TD.float()[None]
    is_later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    mask = torch.zeros(tokens, tokens).masked_fill(is_later, -torch.inf)[None, None]
    with torch.no_grad():
        turns = model.model.rotary_emb(x, torch.arange(tokens)[None])
        attention = model.model.layers[0].self_attn
        out, _ = attention(x, position_embeddings=turns, attention_mask=mask)
    return out[0].double()


def test_24_small_latents_of_few_kv_heads_are_told():
    """Llama-3.2-3B with r = 4 and d_kv = 8, the command of the issue."""
    shape = architecture("gqa", hidden_size=3072, num_heads=24, num_groups=8, head_size=128)
    config = preset("paper-joint", rope_strategy="2-norm", rope_pairs=4, kv_dims_per_head=8)
    assert conversion_problems(config, shape) == []
    (notice,) = conversion_notices(config, shape)
    assert "128 of 2048 numbers per token and layer, 6.2%: a latent of 64 for the keys" in notice
    assert conversion_notices(replace(config, kv_dims_per_head=24), shape) == []


@pytest.mark.parametrize("name", ["mqa", "biased"])
def test_b_kv_heads_repeated_for_every_query_convert_alike(name):
    """Grouped-query made multi-head first: the latent of as many numbers has the same in it."""
    grouped, repeated = Case(name), Case(name, num_groups=4)
    copies = 4 // grouped.shape.num_groups
    for key, tensor in grouped.tensors.items():
        by_head = tensor.unflatten(0, (-1, 12)) if key[0] in "kv" else tensor
        repeated.tensors[key] = (
            by_head.repeat_interleave(copies, 0).flatten(0, 1) if key[0] in "kv" else tensor
        )
    repeated.layer = AttentionLayer.of(repeated.tensors, repeated.shape, dtype=torch.float64)
    config = replace(HIGH, rope_pairs=2)
    truncated = [case.convert(config, rank=9) for case in (grouped, repeated)]
    first, second = (latent_attention(layer, grouped.x_TD) for layer in truncated)
    torch.testing.assert_close(second, first, **EXACT)
    rotary = [cache_of(layer).total - 9 for layer in truncated]
    assert rotary == [4 * grouped.shape.num_groups, 4 * 4], "rotary keys alone are repeated"
    whole = repeated.convert(replace(config, rope_pairs=6), rank=grouped.shape.num_groups * 12)
    torch.testing.assert_close(latent_attention(whole, grouped.x_TD), grouped.original(), **EXACT)


@pytest.mark.parametrize("layout", ["paper", "deepseek"])
def test_c_split_caches_no_more_than_joint(layout):
    case = Case("gqa")
    config = replace(PLAIN, mla_layout=layout, rope_stride=1, rope_pairs=2)
    joint = case.convert(config, rank=10)
    split = case.convert(replace(config, kv_split=True), rank=10)
    assert cache_of(split) == cache_of(joint)
    assert split.down_RD.shape == joint.down_RD.shape


def test_f_converted_layers_know_their_own_pairs():
    """Layers with other pairs and frequencies live side by side, used in turn."""
    case, scaled = Case("gqa"), Case("yarn")
    layers: list[tuple[Case, LatentLayer, Tensor]] = []
    for of, strategy, rule in (
        (case, "high", lambda pair: pair < 3),
        (case, "low", lambda pair: pair >= 3),
        (scaled, "high", lambda pair: pair < 3),
    ):
        turns_GP = torch.tensor([[rule(pair) for pair in range(6)]] * 2)
        layer = of.convert(replace(HIGH, rope_strategy=strategy, rope_pairs=3))
        layers.append((of, layer, of.original(turns_GP=turns_GP)))
    for _ in range(2):
        for of, layer, expected_TD in layers:
            torch.testing.assert_close(latent_attention(layer, of.x_TD), expected_TD, **EXACT)
    assert (layers[0][2] - layers[1][2]).abs().max() > 1e-2


def test_i_whitening_reaches_the_latent_on_the_side_of_the_activations():
    case = Case("gqa")
    statistics, losses = case.statistics(), {}
    for method in ("paper-joint", "whitened"):
        config = preset(method, rope_strategy="high", rope_pairs=2)
        split, _ = split_layer(case.layer, config=config, statistics=statistics)
        latent = compress(split, case.layer, config=config, rank=10, statistics=statistics)
        rows_MD = torch.cat((split.key_plain_GND, case.layer.value_GVD), 1).flatten(0, 1)
        up_MR = torch.cat((latent.key_up_GNR, latent.value_up_GVR), 1).flatten(0, 1)
        error_MD = rows_MD - up_MR @ latent.down_RD
        losses[method] = (
            float((case.x_TD @ error_MD.T).square().sum()),
            float(error_MD.square().sum()),
        )
    assert losses["whitened"][0] < 0.3 * losses["paper-joint"][0]  # of activations
    assert losses["whitened"][1] > losses["paper-joint"][1]  # of weights


def test_n_norms_are_divided_by():
    """A key's error counts by the norm's weight over the root mean square of keys, not times it."""
    case = Case("normed")
    case.layer = replace(case.layer, key_GWD=7 * case.layer.key_GWD)
    statistics = case.statistics()
    config = replace(HIGH, rope_pairs=0)
    split, _ = split_layer(case.layer, config=config, statistics=statistics)
    scale_GN = split.key_scale(case.layer, statistics.moment())
    assert scale_GN is not None and split.norms is not None
    unit_GN = scale_GN / split.norms.key_plain_GN
    scaled_GTN = project(case.x_TD, split.key_plain_GND) * unit_GN[:, None]
    torch.testing.assert_close(scaled_GTN.square().mean((1, 2)), torch.ones(2).double())


@pytest.mark.parametrize("layout", ["paper", "deepseek"])
def test_o_keys_are_balanced_against_whole_values(layout):
    """TransMLA's balance: mean sizes of channels, those of values without a column left out."""
    case = Case("biased")
    config = preset(
        "transmla",
        mla_layout=layout,
        rope_strategy="2-norm",
        rope_stride=1,
        rope_pairs=2,
        kv_balance_factor=1.0,
    )
    statistics = case.statistics()
    split, _ = split_layer(case.layer, config=config, statistics=statistics)
    latent = compress(split, case.layer, config=config, rank=10, statistics=statistics)
    keys_MD, values_MD = split.key_plain_GND.flatten(0, 1), case.layer.value_GVD.flatten(0, 1)
    channels_XD = keys_MD if split.channels_XM is None else split.channels_XM @ keys_MD
    sizes = [(case.x_TD @ w.T).square().mean(0).sqrt().mean() for w in (channels_XD, values_MD)]
    scaled_MD = torch.cat((keys_MD * sizes[1] / sizes[0], values_MD))
    options = {"ridge": config.moment_ridge, "ridge_on": config.ridge_on}
    wanted = factorise(scaled_MD, rank=10, moment_DD=statistics.moment(), **options)
    wanted_MD = wanted.up_MR @ wanted.down_RD
    wanted_MD[: len(keys_MD)] *= sizes[0] / sizes[1]
    found_MR = torch.cat((latent.key_up_GNR.flatten(0, 1), latent.value_up_GVR.flatten(0, 1)))
    torch.testing.assert_close(found_MR @ latent.down_RD, wanted_MD)


def test_7_11_a_conversion_imports_no_framework():
    """Nothing to patch that another transformers renames, and no logger that must be there."""
    for path in (ROOT / "megatron_ext/mla").glob("*.py"):
        for _, name in imports(path.read_text(encoding="utf-8")):
            foreign = [m for m in ("transformers", "megatron", "wandb") if is_in(name, m)]
            assert not foreign, f"{path.name} imports {name}"


def test_the_table_names_tests_that_exist():
    text = (ROOT / "docs/mha2mla.md").read_text(encoding="utf-8")
    _, _, table = text.partition("## Known bugs of other converters")
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", table)
    assert len(named) >= 25
    for file, test in named:
        source = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert f"def {test}(" in source, f"{file} has no {test}"
