"""Any cut of the vocabulary, merged in any order, equals `log_softmax` over all of it."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from megatron_ext.logprobs.partial_softmax import (
    block_statistics,
    empty_statistics,
    finish_statistics,
    logits_gradient_,
    merge_statistics,
)

NUM_COLUMNS = 12


def logits_and_labels(*, scale: float, num_tokens: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(3)
    logits_TV = scale * torch.randn(num_tokens, NUM_COLUMNS, generator=rng, dtype=torch.float64)
    return logits_TV, torch.randint(NUM_COLUMNS, (num_tokens,), generator=rng)


def statistics_of_cut(logits_TV: torch.Tensor, labels_T: torch.Tensor, *, borders: list[int]):
    edges = [0, *borders, NUM_COLUMNS]
    return torch.stack(
        [
            block_statistics(
                logits_TV[:, first:end].clone(),
                labels_T=labels_T,
                first_column=first,
                with_entropy=True,
            )
            for first, end in itertools.pairwise(edges)
        ]
    )


@given(
    borders=st.sets(st.integers(1, NUM_COLUMNS - 1)),
    scale=st.sampled_from([0.0, 1.0, 30.0, 1e4]),
    order=st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=60)
def test_any_cut_in_any_order_equals_log_softmax(borders, scale, order):
    logits_TV, labels_T = logits_and_labels(scale=scale)
    parts = list(statistics_of_cut(logits_TV, labels_T, borders=sorted(borders)))
    order.shuffle(parts)
    merged_KT = empty_statistics(labels_T, dtype=torch.float64, with_entropy=True)
    for part_KT in parts:
        merged_KT = merge_statistics(torch.stack([merged_KT, part_KT]))
    logprob_T, entropy_T = finish_statistics(merged_KT)
    wanted_TV = logits_TV.log_softmax(dim=1)
    assert_close(logprob_T, wanted_TV.gather(1, labels_T[:, None])[:, 0], rtol=1e-12, atol=1e-12)
    assert_close(
        entropy_T,
        -torch.special.xlogy(wanted_TV.exp(), wanted_TV.exp()).sum(1),
        rtol=1e-12,
        atol=1e-12,
    )


def test_nothing_merged_with_nothing_is_nothing():
    nothing_KT = empty_statistics(torch.arange(3), dtype=torch.float32, with_entropy=True)
    assert torch.equal(merge_statistics(torch.stack([nothing_KT, nothing_KT])), nothing_KT)


def test_nan_logits_stay_visible():
    logits_TV, labels_T = logits_and_labels(scale=1.0)
    logits_TV[2, 7] = torch.nan
    merged_KT = merge_statistics(statistics_of_cut(logits_TV, labels_T, borders=[6]))
    for value_T in finish_statistics(merged_KT):
        assert value_T.isnan().tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("of", ["logprob", "entropy", "both"])
def test_gradient_of_a_block_equals_autograd(of, scale):
    logits_TV, labels_T = logits_and_labels(scale=scale)
    logits_TV.requires_grad_()
    log_softmax_TV = logits_TV.log_softmax(dim=1)
    softmax_TV = log_softmax_TV.exp()
    plain = {
        "logprob": log_softmax_TV.gather(1, labels_T[:, None])[:, 0],
        "entropy": -(softmax_TV * log_softmax_TV).sum(dim=1),
    }
    upstream = {"logprob": torch.linspace(-1, 2, 5).double(), "entropy": torch.ones(5).double()}
    chosen = ["logprob", "entropy"] if of == "both" else [of]
    (wanted_TV,) = torch.autograd.grad(
        sum((plain[x] * upstream[x]).sum() for x in chosen), logits_TV
    )
    detached_TV = logits_TV.detach()
    stats_KT = merge_statistics(statistics_of_cut(detached_TV, labels_T, borders=[4]))
    got = [
        logits_gradient_(
            detached_TV[:, first:end].clone(),
            labels_T=labels_T,
            first_column=first,
            stats_KT=stats_KT,
            grad_logprob_T=upstream["logprob"] if "logprob" in chosen else None,
            grad_entropy_T=upstream["entropy"] if "entropy" in chosen else None,
        )
        for first, end in [(0, 5), (5, 6), (6, NUM_COLUMNS)]
    ]
    assert_close(torch.cat(got, dim=1), wanted_TV, rtol=1e-10, atol=1e-14)
