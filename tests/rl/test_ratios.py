"""Ratios of whole sequences: wherever a sequence lies, and whatever lies beside it."""

import pytest
import torch
from hypothesis import given, settings

from megatron_ext.packing import RowLayout, build_microbatches, loss_weights
from megatron_ext.rl.ratios import sequence_ids, sequence_log_ratio, sequence_mean
from tests.rl.steps import batches, to_sample


def built(episodes, microbatches, *, packed, **layout):
    samples = [to_sample(e) for e in episodes]
    law = loss_weights(
        [s.mask for s in samples], microbatches=microbatches, mode="sample-mean", packed=packed
    )
    rows = RowLayout(packed=packed, extras={"logp": torch.float64}, **layout)
    return build_microbatches(samples, microbatches=microbatches, loss=law, layout=rows)


@settings(max_examples=30, deadline=None)
@given(batch=batches())
def test_every_position_knows_its_sequence(batch):
    episodes, microbatches = batch
    for packed in (True, False):
        rows = built(episodes, microbatches, packed=packed, pad_to_multiple=4)
        for members, microbatch in zip(microbatches, rows, strict=True):
            lengths = [len(episodes[i].mask) for i in members]
            width = microbatch.tokens_BS.shape[1]
            if packed:
                want = [k for k, n in enumerate(lengths) for _ in range(n)]
                want += [len(lengths)] * (width - len(want))  # the padding is a sequence of its own
                assert sequence_ids(microbatch).tolist() == [want]
            else:
                rows_of = range(max(len(lengths), 1))
                assert sequence_ids(microbatch).tolist() == [[k] * width for k in rows_of]


@settings(max_examples=30, deadline=None)
@given(batch=batches())
def test_mean_is_over_the_trained_tokens_of_the_own_sequence(batch):
    episodes, _ = batch
    (microbatch,) = built(
        episodes, [list(range(len(episodes)))], packed=True, capacity=32, max_segments=6
    )
    mean = sequence_mean(
        microbatch.extras["logp"],
        trained_T=microbatch.weights_BS != 0,
        sequence_T=sequence_ids(microbatch),
    )
    at = 0
    for episode in episodes:
        values = [episode.logp[t] for t in episode.trained]
        want = sum(values) / len(values) if values else 0.0
        for position in range(at, at + len(episode.mask)):
            assert float(mean[0, position]) == pytest.approx(want, rel=1e-12)
        at += len(episode.mask)


def test_a_sequence_beyond_the_limit_is_clamped_and_has_no_gradient():
    logp = torch.tensor([[-1.0, -1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    found = sequence_log_ratio(
        logp,
        torch.tensor([[-90.0, -10.0, -2.0]], dtype=torch.float64),
        trained_T=torch.ones(1, 3, dtype=torch.bool),
        sequence_T=torch.tensor([[0, 0, 1]]),
    )
    assert found.tolist() == [[20.0, 20.0, 1.0]]
    found.sum().backward()
    assert logp.grad.tolist() == [[0.0, 0.0, 1.0]]
