"""Microbatches from sequences: borders, shifts, fillers, extras, truncation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.packing import (
    RowLayout,
    Sample,
    build_microbatch,
    build_microbatches,
    filler_microbatch,
    loss_weights,
)
from megatron_ext.packing.batch import (
    fit_samples,
    mask_from_roles,
    to_token_values,
    turn_ids_from_roles,
)

OLD_LOGP = {"old_logp": torch.float32}


def sample(tokens, mask, **extras):
    return Sample(
        tokens=torch.tensor(tokens),
        mask=torch.tensor(mask, dtype=torch.bool),
        extras={name: torch.tensor(values) for name, values in extras.items()},
    )


def build(samples, layout, mode="global-token-mean"):
    microbatches = [list(range(len(samples)))]
    law = loss_weights(
        [s.mask for s in samples], microbatches=microbatches, mode=mode, packed=layout.packed
    )
    (batch,) = build_microbatches(samples, microbatches=microbatches, loss=law, layout=layout)
    return batch


def test_a_packed_row_written_out():
    samples = [
        sample([5, 6, 7], [0, 1, 1], old_logp=[0.0, -1.0, -2.0]),
        sample([8, 9], [1, 1], old_logp=[0.0, -3.0]),
    ]
    batch = build(samples, RowLayout(pad_to_multiple=4, pad_token=1, extras=OLD_LOGP))
    assert batch.tokens_BS.tolist() == [[5, 6, 7, 8, 9, 1, 1, 1]]
    assert batch.positions_BS.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert batch.labels_BS.tolist() == [[6, 7, 1, 9, 1, 1, 1, 1]]
    assert batch.weights_BS.tolist() == [[1, 1, 0, 1, 0, 0, 0, 0]]  # case D3, then padding
    assert batch.extras["old_logp"].tolist() == [[-1, -2, 0, -3, 0, 0, 0, 0]]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 8]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.weights_BS.dtype == torch.float32
    assert (batch.count, batch.num_positions) == (3, 8)


def test_padded_rows_written_out():
    samples = [sample([5, 6, 7], [0, 1, 1]), sample([8, 9], [1, 1])]
    batch = build(samples, RowLayout(packed=False, pad_to_multiple=4))
    assert batch.tokens_BS.tolist() == [[5, 6, 7, 0], [8, 9, 0, 0]]
    assert batch.labels_BS.tolist() == [[6, 7, 0, 0], [9, 0, 0, 0]]
    assert batch.weights_BS.tolist() == [[1, 1, 0, 0], [1, 0, 0, 0]]
    assert batch.cu_seqlens is None
    assert batch.count == 3


def test_case_d1_log_probs_come_back_aligned_with_their_tokens():
    a1, a2, b1 = -1.0, -2.0, -3.0
    values = torch.tensor([[a1, a2, 9.0, b1, 9.0, 9.0]])  # 9: what nothing reads
    aligned = to_token_values(values, lengths=[3, 2])
    assert torch.cat(aligned).tolist() == [0, a1, a2, 0, b1]
    padded = torch.tensor([[a1, a2, 9.0], [b1, 9.0, 9.0]])
    aligned = to_token_values(padded, lengths=[3, 2], packed=False)
    assert torch.cat(aligned).tolist() == [0, a1, a2, 0, b1]


def test_case_d3_a_shifted_mask_does_not_cross_the_border():
    batch = build([sample([1, 2, 3], [0, 1, 1]), sample([4, 5], [1, 1])], RowLayout())
    assert batch.weights_BS.tolist() == [[1, 1, 0, 1, 0]]


def test_case_d4_borders_end_at_the_row_and_stay_monotone():
    samples = [sample([1, 2, 3], [0, 1, 1]), sample([4, 5], [1, 1])]
    batch = build(samples, RowLayout(capacity=8, max_segments=4))
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 8, 8, 8]
    full = build(samples, RowLayout(capacity=5, max_segments=2))
    assert full.cu_seqlens.tolist() == [0, 3, 5, 5]


def test_case_d11_only_assistant_tokens_are_trained():
    roles = ["system", "user", "assistant", "tool", "assistant"]
    assert mask_from_roles(roles).int().tolist() == [0, 0, 1, 0, 1]
    assert turn_ids_from_roles(roles).tolist() == [-1, -1, 0, -1, 1]
    spans = turn_ids_from_roles(["user", "assistant"], lengths=[2, 3])
    assert spans.tolist() == [-1, -1, 0, 0, 0]
    assert mask_from_roles([]).tolist() == []
    with pytest.raises(ValueError, match="2 roles but 1 lengths"):
        mask_from_roles(["user", "assistant"], lengths=[2])


@pytest.mark.parametrize("packed", [True, False])
def test_a_filler_has_every_field_and_adds_nothing(packed):
    layout = RowLayout(packed=packed, pad_to_multiple=4, pad_token=2, extras=OLD_LOGP)
    filler = filler_microbatch(layout)
    assert filler.tokens_BS.tolist() == filler.labels_BS.tolist() == [[2, 2, 2, 2]]
    assert (filler.count, float(filler.weights_BS.sum())) == (0, 0)
    assert filler.extras["old_logp"].tolist() == [[0, 0, 0, 0]]
    if packed:
        assert filler.cu_seqlens.tolist() == [0, 4]
        fixed = filler_microbatch(RowLayout(capacity=8, max_segments=2))
        assert fixed.cu_seqlens.tolist() == [0, 8, 8, 8]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_packed_and_padded_hold_the_same_predictions(data):
    """The multiset of (token, its predecessor, weight, extra, position) does not depend on rows."""
    lengths = data.draw(st.lists(st.integers(1, 6), max_size=5))
    masks = [data.draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in lengths]
    samples = [
        sample(list(range(10 * s, 10 * s + n)), m, old_logp=[-0.5 - t for t in range(n)])
        for s, (n, m) in enumerate(zip(lengths, masks, strict=True))
    ]
    multiple = data.draw(st.integers(1, 4))
    want = {
        (10 * s + t, 10 * s + t + 1, -1.5 - t, t)
        for s, m in enumerate(masks)
        for t in range(len(m) - 1)
        if m[t + 1]
    }
    for packed in (True, False):
        layout = RowLayout(packed=packed, pad_to_multiple=multiple, extras=OLD_LOGP)
        batch = build(samples, layout)
        fields = (batch.tokens_BS, batch.labels_BS, batch.extras["old_logp"], batch.positions_BS)
        trained = batch.weights_BS > 0
        got = list(zip(*(field[trained].tolist() for field in fields), strict=True))
        assert len(got) == batch.count
        assert set(got) == want
        assert batch.tokens_BS.shape[1] % multiple == 0
        back = to_token_values(batch.extras["old_logp"], lengths=lengths, packed=packed)
        for values, given_sample in zip(back, samples, strict=True):
            assert values[0] == 0
            assert torch.equal(values[1:], given_sample.extras["old_logp"][1:].float())


def test_samples_are_truncated_with_everything_they_carry():
    samples = [sample([1, 2, 3], [0, 1, 1], old_logp=[0.0, 1.0, 2.0]), sample([4], [1])]
    kept, fitted = fit_samples(samples, 2, overlong="truncate")
    assert kept[0].tokens.tolist() == [1, 2]
    assert kept[0].extras["old_logp"].tolist() == [0, 1]
    assert (len(kept), fitted.num_truncated) == (2, 1)
    kept, fitted = fit_samples(samples, 2, overlong="drop")
    assert [s.tokens.tolist() for s in kept] == [[4]]
    assert fitted.num_dropped == 1


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"mask \[1\], old \[3\] must have one value per token"):
        sample([1, 2], [1], old=[0.0, 0.0, 0.0])
    with pytest.raises(ValueError, match="n >= 1"):
        sample([], [])
    with pytest.raises(ValueError, match=r"capacity 9 is not a multiple of 2.*Use 10 or 8"):
        RowLayout(capacity=9, pad_to_multiple=2)
    one = sample([1, 2], [0, 1])
    layout = RowLayout(capacity=3, max_segments=1, extras=OLD_LOGP)
    weights = torch.ones(2)
    with pytest.raises(ValueError, match="lacks extras old_logp"):
        build_microbatch([one], weights=[weights], count=1, layout=layout)
    with pytest.raises(ValueError, match="2 sequences in a row of at most 1"):
        build_microbatch([one, one], weights=[weights, weights], count=1, layout=layout)
    with pytest.raises(ValueError, match=r"weights \[3\] for tokens \[2\]"):
        build_microbatch([one], weights=[torch.ones(3)], count=1, layout=RowLayout())
    with pytest.raises(ValueError, match="a row of 4 tokens does not fit its capacity 3"):
        build_microbatch(
            [one, one], weights=[weights, weights], count=1, layout=RowLayout(capacity=3)
        )
