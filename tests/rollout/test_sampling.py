"""Draws follow the exact probabilities, row by row, and say them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_ext.rollout.sampling import draw, first_maximum, inverse_cdf, probabilities
from megatron_ext.rollout.types import SamplingParams
from megatron_ext.rollout.uniforms import UniformStream

CUTS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(top_k=3),
    SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.2),
    SamplingParams(temperature=2.0, top_k=6, top_p=0.9, min_p=0.1),
]


def naive_probabilities(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """Temperature, top-k, top-p and min-p one after the other, each by sorting."""
    p = torch.softmax(logits_V.double() / (params.temperature or 1.0), dim=0)
    order = p.argsort(descending=True)
    kept = order[: params.top_k] if params.top_k else order
    share = p[kept] / p[kept].sum()
    before = share.cumsum(0) - share
    kept = kept[before < params.top_p]
    kept = kept[p[kept] >= params.min_p * p.max()]
    found = torch.zeros_like(p)
    found[kept] = p[kept] / p[kept].sum()
    return found


@pytest.mark.parametrize("params", CUTS)
@pytest.mark.parametrize("size", [7, 1500])
def test_probabilities_are_those_of_the_naive_cuts(params, size):
    logits = torch.randn(4, size, generator=torch.Generator().manual_seed(1)) * 2
    for row, found in zip(logits, probabilities(logits, params), strict=True):
        torch.testing.assert_close(
            found.double(), naive_probabilities(row, params), rtol=1e-5, atol=1e-7
        )


@pytest.mark.parametrize("params", CUTS)
@pytest.mark.parametrize("size", [7, 1500])
def test_frequencies_match_the_probabilities(params, size):
    """Chi-square at a fixed seed; bins of few expected draws are put together."""
    count = 20_000
    logits_V = torch.randn(size, generator=torch.Generator().manual_seed(3)) * 2
    stream = UniformStream(seed=11, sample=0)
    drawn = draw(
        logits_V.repeat(count, 1),
        params=[params] * count,
        uniforms=[stream.at(i) for i in range(count)],
    )
    expected = naive_probabilities(logits_V, params) * count
    observed = torch.bincount(torch.tensor(drawn.tokens), minlength=size).double()
    assert observed[expected == 0].sum() == 0
    is_rare = expected < 10
    bins = [(o, e) for o, e in zip(observed[~is_rare], expected[~is_rare], strict=True)]
    if expected[is_rare].sum() > 0:
        bins.append((observed[is_rare].sum(), expected[is_rare].sum()))
    chi_square = sum(float((o - e) ** 2 / e) for o, e in bins)
    freedom = len(bins) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 1


@pytest.mark.parametrize("params", [*CUTS, SamplingParams(temperature=0)])
def test_logprobs_are_those_of_the_distribution_drawn_from(params):
    logits = torch.randn(16, 900, generator=torch.Generator().manual_seed(2)) * 3
    drawn = draw(
        logits.clone(),
        params=[params] * 16,
        uniforms=[(i + 0.5) / 16 for i in range(16)],
        num_top=[3] * 16,
    )
    for row, token, logprob, top in zip(
        logits, drawn.tokens, drawn.logprobs, drawn.top, strict=True
    ):
        exact = naive_probabilities(row, params)
        assert logprob == pytest.approx(float(exact[token].log()), abs=2e-6)
        best = exact.topk(3)
        kept = int((best.values > 0).sum())
        assert [t for t, _ in top] == best.indices[:kept].tolist()
        assert [p for _, p in top] == pytest.approx(best.values[:kept].log().tolist(), abs=2e-6)


def test_temperature_of_case_b13():
    drawn = draw(
        torch.tensor([[2.0, 0.0, -1.0]]), params=[SamplingParams(temperature=0.5)], uniforms=[0.1]
    )
    assert drawn.tokens == [0]
    assert drawn.logprobs == pytest.approx([-0.020581], abs=1e-6)


def test_greedy_takes_the_most_likely_token_at_temperature_one():
    drawn = draw(
        torch.tensor([[0.0, 2.0, 2.0]]), params=[SamplingParams(temperature=0)], uniforms=[0.9]
    )
    assert drawn.tokens == [1]
    assert drawn.logprobs == pytest.approx([math.log(math.e**2 / (1 + 2 * math.e**2))], abs=1e-6)


@pytest.mark.parametrize("size", [40, 1100, 5000])
def test_rows_with_other_parameters_do_not_matter(size):
    logits = torch.randn(9, size, generator=torch.Generator().manual_seed(5))
    params = [CUTS[i % len(CUTS)] for i in range(8)] + [SamplingParams(temperature=0)]
    uniforms = [0.07 + 0.1 * i for i in range(9)]
    together = draw(logits.clone(), params=params, uniforms=uniforms, num_top=[1, 0, 2] * 3)
    for row in range(9):
        alone = draw(logits[row : row + 1].clone(), params=[params[row]], uniforms=[uniforms[row]])
        assert alone.tokens == [together.tokens[row]]
        assert alone.logprobs == pytest.approx([together.logprobs[row]], abs=1e-6)
    assert [len(top) for top in together.top] == [1, 0, 2] * 3


@pytest.mark.parametrize("size", [3, 1000, 1024, 1025, 3000])
def test_inverse_cdf_at_the_borders(size):
    """Tokens without weight are never drawn, whatever the number."""
    weights = torch.zeros(3, size)
    weights[0, size - 1] = 1e-30
    weights[1, [0, size // 2]] = torch.tensor([1.0, 1.0])
    weights[2, 1] = 5.0
    for uniform, second in ((0.0, 0), (0.5, size // 2), (1 - 2**-53, size // 2)):
        tokens, _ = inverse_cdf(weights, torch.full((3,), uniform, dtype=torch.float64))
        assert tokens.tolist() == [size - 1, second, 1]


@pytest.mark.parametrize("size", [5, 1024, 1025, 2000])
def test_first_maximum_is_argmax(size):
    values = torch.randint(0, 4, (50, size), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(first_maximum(values), values.argmax(dim=1))


def test_bad_parameters_are_named_together():
    with pytest.raises(ValueError, match=r"temperature -1.*top_k -2.*top_p 0.*min_p 2"):
        SamplingParams(temperature=-1, top_k=-2, top_p=0, min_p=2)


def test_uniform_numbers_depend_on_stream_and_index_only():
    stream = UniformStream(seed=2**63, sample=1)
    expected = [stream.at(i) for i in range(300)]
    backwards = UniformStream(seed=2**63, sample=1)
    assert [backwards.at(i) for i in reversed(range(300))] == expected[::-1]
    assert all(0 <= value < 1 for value in expected)
    others = {UniformStream(seed=s, sample=n).at(0) for s in range(20) for n in range(20)}
    assert len(others) == 400
