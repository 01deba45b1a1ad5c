"""Kept pairs are the masks of the authors' code written out; frequencies those of transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_ext.mla.rotary_pairs import rotary_pairs
from megatron_ext.mla.selection import (
    dropped_pairs,
    norm_scores,
    pairs_by_rule,
    pairs_by_score,
)
from megatron_ext.weights.architecture import Rope

ROPES = {
    "default": Rope(theta=5e5),
    "linear": Rope(kind="linear", factor=4.0),
    "llama3": Rope(
        kind="llama3", theta=5e5, factor=8.0, original_positions=8192, high_freq_factor=4.0
    ),
    "yarn": Rope(kind="yarn", factor=4.0, original_positions=4096),
    "yarn mscale": Rope(
        kind="yarn", factor=40.0, original_positions=64, mscale=0.7, mscale_all_dim=1.0
    ),
    "yarn attention": Rope(
        kind="yarn", factor=2.0, original_positions=64, attention_factor=1.5, is_truncated=False
    ),
}


def authors_mask(rule: str, *, head_size: int, kept: int, start: int) -> list[int]:
    """MHA2MLA's mask over the widths of a head in halves, element by element; its set entries."""
    half, mask = head_size // 2, [0] * head_size
    if rule == "high":
        for i in range(kept):
            mask[i] = mask[half + i] = 1
    if rule == "low":
        for i in range(kept):
            mask[half - 1 - i] = mask[head_size - 1 - i] = 1
    if rule == "uniform":
        for i in range(start, head_size, head_size // (2 * kept)):
            mask[i] = 1
    return [i for i, is_set in enumerate(mask) if is_set]


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("kept", [1, 2, 4, 8])
@pytest.mark.parametrize(("rule", "start"), [("high", 0), ("low", 0), ("uniform", 0)])
def test_rules_are_the_masks_of_the_authors(rule, start, kept, is_interleaved):
    pairs = rotary_pairs(Rope(is_interleaved=is_interleaved), head_size=16)
    chosen = pairs_by_rule(rule, num_pairs=8, kept=kept, start=start)
    widths = sorted((pairs.first_P[chosen].tolist()) + pairs.second_P[chosen].tolist())
    expected = authors_mask(rule, head_size=16, kept=kept, start=start)
    if is_interleaved:
        expected = sorted(2 * (w % 8) + w // 8 for w in expected)
    assert widths == expected


def test_uniform_starts_where_it_is_told():
    assert pairs_by_rule("uniform", num_pairs=8, kept=2, start=3).tolist() == [3, 7]
    with pytest.raises(ValueError, match=r"--rope-uniform-start 4: .* from 0 to 3"):
        pairs_by_rule("uniform", num_pairs=8, kept=2, start=4)


@pytest.mark.parametrize("rule", ["high", "low", "uniform"])
def test_no_pair_and_all_pairs(rule):
    assert pairs_by_rule(rule, num_pairs=6, kept=0).tolist() == []
    assert pairs_by_rule(rule, num_pairs=6, kept=6).tolist() == list(range(6))


def test_what_cannot_be_kept_is_refused():
    with pytest.raises(ValueError, match=r"--rope-pairs 5 does not divide the 12 .* Use 4 or 6\."):
        pairs_by_rule("uniform", num_pairs=12, kept=5)
    for kept in (-1, 13):
        with pytest.raises(ValueError, match=rf"--rope-pairs {kept}: a head has 12 .* 0 to 12"):
            pairs_by_rule("high", num_pairs=12, kept=kept)
        with pytest.raises(ValueError, match=f"--rope-pairs {kept}"):
            pairs_by_score(torch.zeros(2, 12), kept=kept)
    with pytest.raises(ValueError, match="not finite"):
        pairs_by_score(torch.full((2, 12), torch.nan), kept=1)


@pytest.mark.parametrize("combine", ["product", "sum"])
def test_norm_scores_and_their_order(combine):
    torch.manual_seed(0)
    query_HP, key_GP = torch.rand(6, 5), torch.rand(2, 5)
    scores_GP = norm_scores(query_HP, key_GP, combine=combine)
    chosen_GK = pairs_by_score(scores_GP, kept=2)
    for group in range(2):
        scores = []
        for pair in range(5):
            score = 0.0
            for head in range(3 * group, 3 * group + 3):
                q, k = float(query_HP[head, pair]), float(key_GP[group, pair])
                score += q * k if combine == "product" else q + k
            scores.append(score)
        assert scores_GP[group].tolist() == pytest.approx(scores)
        best = sorted(range(5), key=lambda pair: -scores[pair])[:2]
        assert chosen_GK[group].tolist() == sorted(best)
        assert dropped_pairs(chosen_GK, num_pairs=5)[group].tolist() == sorted(
            set(range(5)) - set(best)
        )


def test_the_faster_pair_wins_a_tie():
    assert pairs_by_score(torch.ones(1, 4), kept=2).tolist() == [[0, 1]]
    assert dropped_pairs(torch.zeros(2, 0, dtype=torch.int64), num_pairs=2).tolist() == [[0, 1]] * 2


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_frequencies_are_those_of_transformers(name, share):
    rope = ROPES[name]
    fields = {
        "rope_type": rope.kind,
        "rope_theta": rope.theta,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_positions,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "mscale": rope.mscale or None,
        "mscale_all_dim": rope.mscale_all_dim or None,
        "attention_factor": rope.attention_factor or None,
        "truncate": rope.is_truncated,
        "partial_rotary_factor": share,
    }
    # heads of 24 where hidden / heads is 16
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=24)
    config.rope_parameters = {k: v for k, v in fields.items() if v is not None}
    if rope.kind == "default":
        powers = rope.theta ** (torch.arange(0, int(24 * share), 2).float() / int(24 * share))
        expected, scale = 1.0 / powers, 1.0
    else:
        expected, scale = ROPE_INIT_FUNCTIONS[rope.kind](config)
    pairs = rotary_pairs(with_share(rope, share), head_size=24)
    assert torch.equal(pairs.frequencies_P, expected)
    assert pairs.scale == scale
    assert len(pairs.plain) == 24 - int(24 * share)


def with_share(rope: Rope, share: float) -> Rope:
    """The same embedding of a share of each head."""
    values = {name: getattr(rope, name) for name in rope.__dataclass_fields__}
    return Rope(**(values | {"rotated_share": share}))


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_turning_complex_pairs_is_turning_widths(is_interleaved):
    torch.manual_seed(0)
    pairs = rotary_pairs(Rope(rotated_share=0.75, is_interleaved=is_interleaved), head_size=8)
    x_TW = torch.randn(5, 8, dtype=torch.float64)
    expected = x_TW.clone()
    for t in range(5):
        for pair, frequency in enumerate(pairs.frequencies_P.tolist()):
            a = 2 * pair if is_interleaved else pair
            b = 2 * pair + 1 if is_interleaved else pair + 3
            expected[t, [a, b]] = rotation(t * frequency) @ x_TW[t, [a, b]]
    torch.testing.assert_close(pairs.turn(x_TW, torch.arange(5)), expected, rtol=0, atol=1e-12)


def rotation(angle: float) -> Tensor:
    """By an angle, as a matrix."""
    c, s = (f(torch.tensor(angle, dtype=torch.float64)) for f in (torch.cos, torch.sin))
    return torch.stack([torch.stack([c, -s]), torch.stack([s, c])])


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (Rope(kind="longrope"), "rope_type 'longrope'.* default, linear, llama3, yarn"),
        (Rope(kind="dynamic"), "rope_type 'dynamic'"),
        (Rope(rotated_share=0.3), "partial_rotary_factor 0.3 of a head_dim of 10 turns 3"),
    ],
)
def test_other_embeddings_are_refused(rope, message):
    with pytest.raises(ValueError, match=message):
        rotary_pairs(rope, head_size=10)
