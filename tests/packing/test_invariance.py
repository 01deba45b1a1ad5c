"""Loss and gradients of a tiny attention model equal the plain computation, for any packing."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from megatron_ext.packing import (
    RowLayout,
    Sample,
    allocate,
    build_microbatches,
    loss_weights,
)
from megatron_ext.packing.attention import dense_attention, packed_attention
from megatron_ext.packing.batch import turn_ids_from_roles
from megatron_ext.packing.leak import RIGHT, WRONG, packing_errors
from tests.references import normalized_loss, padded_token_losses

VOCABULARY, HEADS, KV_HEADS, WIDTH = 23, 4, 2, 8
MODES = ("token-sum", "global-token-mean", "sample-mean", "turn-mean", "constant")
SHAPES = {
    "tokens": (VOCABULARY, HEADS * WIDTH),
    "positions": (64, HEADS * WIDTH),
    "q": (HEADS * WIDTH, HEADS * WIDTH),
    "k": (HEADS * WIDTH, KV_HEADS * WIDTH),
    "v": (HEADS * WIDTH, KV_HEADS * WIDTH),
    "head": (HEADS * WIDTH, VOCABULARY),
}


def parameters():
    generator = torch.Generator().manual_seed(3)
    return {
        name: (0.3 * torch.randn(shape, dtype=torch.float64, generator=generator)).requires_grad_()
        for name, shape in SHAPES.items()
    }


def logits(weights, tokens, positions, attention):
    """[B, S, V] of one attention layer with learned positions."""
    h = weights["tokens"][tokens] + weights["positions"][positions]
    q, k, v = ((h @ weights[n]).unflatten(-1, (-1, WIDTH)) for n in "qkv")
    h = h + attention(q, k, v).flatten(-2)
    return h @ weights["head"]


def token_losses(weights, tokens, positions, labels, attention):
    """Cross-entropy [B, S] of the labels."""
    found = logits(weights, tokens, positions, attention)
    return F.cross_entropy(found.transpose(1, 2), labels, reduction="none")


def conversations():
    """Ragged multi-turn sequences, one of them without a trained token."""
    generator = torch.Generator().manual_seed(7)
    spans = [[3, 4], [2, 5, 3, 6], [4, 1, 1, 2, 2, 9], [5, 0], [1, 12], [2, 3, 2, 1]]
    samples = []
    for lengths in spans:
        turn_ids = turn_ids_from_roles(["user", "assistant"] * (len(lengths) // 2), lengths=lengths)
        tokens = torch.randint(VOCABULARY, (sum(lengths),), generator=generator)
        samples.append(Sample(tokens=tokens, mask=turn_ids >= 0, turn_ids=turn_ids))
    return samples


def options(mode, samples):
    return {
        "token-sum": {"global_batch_size": len(samples)},
        "turn-mean": {"turn_ids": [s.turn_ids for s in samples]},
        "constant": {"max_length": 16},
    }.get(mode, {})


def plain(samples, mode):
    """All samples in one padded batch and the sentence of the mode; no packing code."""
    weights = parameters()

    def logits_of(tokens, positions):
        return logits(weights, tokens, positions, dense_attention)

    total = normalized_loss(
        padded_token_losses(logits_of, samples, vocab_size=VOCABULARY),
        [s.mask for s in samples],
        mode=mode,
        turn_ids=[s.turn_ids for s in samples],
        max_length=16,
        denominator=len(samples) if mode == "token-sum" else None,
    )
    total.backward()
    return float(total.detach()), {name: w.grad for name, w in weights.items()}


def through_microbatches(samples, mode, *, packing, max_tokens, ranks, multiple):
    """The step as ranks run it: sum of w * loss over microbatches, divided by the counted N."""
    plan = allocate(
        [len(s.tokens) for s in samples],
        max_tokens=max_tokens,
        data_parallel_size=ranks,
        packing=packing,
        pipeline_size=2,
        group_size=2,
    )
    layout = RowLayout(packed=packing, pad_to_multiple=multiple)
    weights = parameters()
    total, counted = 0.0, 0
    for rank, microbatches in enumerate(plan):
        law = loss_weights(
            [s.mask for s in samples],
            microbatches=microbatches,
            mode=mode,
            packed=packing,
            counts_global_batch=rank == 0,
            **options(mode, samples),
        )
        for batch in build_microbatches(
            samples, microbatches=microbatches, loss=law, layout=layout
        ):
            losses = token_losses(
                weights, batch.tokens_BS, batch.positions_BS, batch.labels_BS, attention_of(batch)
            )
            loss = (torch.where(batch.weights_BS > 0, losses, 0.0) * batch.weights_BS).sum()
            loss.backward()  # also from a filler: it has a graph
            total, counted = total + float(loss.detach()), counted + batch.count
    return total / counted, {name: w.grad / counted for name, w in weights.items()}


def attention_of(batch):
    if batch.cu_seqlens is None:
        return dense_attention
    return lambda q, k, v: packed_attention(q[0], k[0], v[0], cu_seqlens=batch.cu_seqlens)[None]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "layout",
    [
        dict(packing=True, max_tokens=20, ranks=1, multiple=1),
        dict(packing=True, max_tokens=33, ranks=2, multiple=4),
        dict(packing=True, max_tokens=100, ranks=4, multiple=3),
        dict(packing=False, max_tokens=20, ranks=1, multiple=1),
        dict(packing=False, max_tokens=60, ranks=4, multiple=4),
    ],
)
def test_loss_and_gradients_do_not_depend_on_the_layout(mode, layout):
    samples = conversations()
    loss, gradients = through_microbatches(samples, mode, **layout)
    want, plain_gradients = plain(samples, mode)
    assert loss == pytest.approx(want, rel=1e-6)  # weights are float32: 1 / n rounds at 6e-8
    for name, gradient in gradients.items():
        assert_close(gradient, plain_gradients[name], rtol=1e-6, atol=1e-8)


def test_leaky_packing_is_caught():
    """Without the block mask, or with running positions too, log-probabilities are off by far."""

    def logprobs_of(batch):
        positions, labels = batch.positions_BS, batch.labels_BS
        return -token_losses(
            parameters(), batch.tokens_BS, positions, labels, attention_of(batch)
        ).detach()

    errors = packing_errors(logprobs_of, conversations(), capacity=64, pad_to_multiple=3)
    assert errors[RIGHT] < 1e-12
    assert [errors[way] > 0.05 for way in WRONG] == [True, True]
