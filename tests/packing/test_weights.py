"""The law of loss normalisation against plain loops, and the known mistakes of the field."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from megatron_ext.packing import loss_weights
from megatron_ext.packing.weights import local_mean_token_weights, turns_from_mask
from tests.references import local_mean_loss, normalized_loss

MODES = ("token-sum", "global-token-mean", "row-mean", "sample-mean", "turn-mean", "constant")
MAX_LENGTH = 7
BATCH_SIZE = 5


def mask(*values):
    return torch.tensor(values, dtype=torch.bool)


def options(mode, turn_ids=None):
    """What `mode` needs besides masks and microbatches."""
    return {
        "token-sum": {"global_batch_size": BATCH_SIZE},
        "turn-mean": {"turn_ids": turn_ids},
        "constant": {"max_length": MAX_LENGTH},
    }.get(mode, {})


def step_loss(losses, law):
    """(1 / N) sum w l, masked values removed."""
    total = sum(
        torch.where(w > 0, w * loss, 0.0).sum() for w, loss in zip(law.weights, losses, strict=True)
    )
    return total / max(law.total, 1)


@st.composite
def steps(draw):
    """Masks, and microbatches that hold every sequence once, some of them fillers."""
    masks = draw(st.lists(st.lists(st.booleans(), min_size=1, max_size=8), max_size=6))
    microbatches = [[] for _ in range(draw(st.integers(1, 4)))]
    for i in range(len(masks)):
        microbatches[draw(st.integers(0, len(microbatches) - 1))].append(i)
    return [mask(*values) for values in masks], microbatches


@settings(max_examples=12, deadline=None)
@given(steps(), st.booleans())
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_its_sentence(mode, step, packed):
    masks, microbatches = step
    generator = torch.Generator().manual_seed(len(masks))
    losses = [torch.randn(len(m), dtype=torch.float64, generator=generator) for m in masks]
    turns = [turns_from_mask(m) for m in masks]
    law = loss_weights(
        masks,
        microbatches=microbatches,
        mode=mode,
        packed=packed,
        dtype=torch.float64,
        **options(mode, turns),
    )
    rows = microbatches if packed else [[i] for i in range(len(masks))]
    want = normalized_loss(
        losses,
        masks,
        mode=mode,
        turn_ids=turns,
        rows=rows,
        max_length=MAX_LENGTH,
        denominator=BATCH_SIZE if mode == "token-sum" else None,
    )
    assert_close(float(step_loss(losses, law)), float(want), rtol=1e-12, atol=1e-14)
    assert all(isinstance(count, int) for count in law.counts)
    assert sum(law.num_trained) == sum(int(m[1:].sum()) for m in masks)
    assert mode != "global-token-mean" or law.counts == law.num_trained


@settings(max_examples=6, deadline=None)
@given(steps())
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "row-mean"])
def test_packing_does_not_change_weights_or_n(mode, step):
    masks, microbatches = step
    extra = options(mode, [turns_from_mask(m) for m in masks])
    law = loss_weights(masks, microbatches=microbatches, mode=mode, **extra)
    one = [list(range(len(masks)))]
    plain = loss_weights(masks, microbatches=one, mode=mode, packed=False, **extra)
    assert all(torch.equal(a, b) for a, b in zip(law.weights, plain.weights, strict=True))
    assert law.total == plain.total


@pytest.mark.parametrize("mode", MODES)
def test_ranks_that_plan_alone_add_up_to_one_plan(mode):
    masks = [mask(1, 1, 0, 1), mask(0, 1), mask(0, 0, 0), mask(1, 1, 1)]
    extra = options(mode, [turns_from_mask(m) for m in masks])
    microbatches = [[0, 2], [1], [3], []]
    whole = loss_weights(masks, microbatches=microbatches, mode=mode, **extra)
    parts = [
        loss_weights(masks, microbatches=share, mode=mode, counts_global_batch=rank == 0, **extra)
        for rank, share in enumerate([microbatches[:2], microbatches[2:]])
    ]
    assert [count for part in parts for count in part.counts] == whole.counts
    for i, weights in enumerate(whole.weights):
        assert torch.equal(parts[0].weights[i] + parts[1].weights[i], weights)


def test_case_a1_the_mean_is_over_tokens_not_over_microbatches():
    masks = [mask(0, 1, 1, 1, 1), mask(0, 1)]
    losses = [torch.tensor([0.0, 2, 2, 2, 2]), torch.tensor([0.0, 8])]
    law = loss_weights(masks, microbatches=[[0], [1]], mode="global-token-mean")
    assert law.counts == [4, 1]
    assert float(step_loss(losses, law)) == pytest.approx(3.2, abs=1e-6)


def test_case_a4_shares_of_context_parallel_ranks_add_up():
    """The weights of a row split over two ranks, the count on one: 1.0 without any factor."""
    law = loss_weights([mask(0, 1, 1, 1, 1)], microbatches=[[0]], mode="global-token-mean")
    shares = law.weights[0][1:].chunk(2)
    assert float(sum((w * 1.0).sum() for w in shares)) / law.total == 1.0


@pytest.mark.parametrize("microbatches", [[[0, 1]], [[0], [1]], [[1, 0], []]])
def test_case_a8_constant_length_for_any_split(microbatches):
    masks = [mask(0, 1, 1, 1, 1), mask(0, 1, 1)]
    law = loss_weights(masks, microbatches=microbatches, mode="constant", max_length=8)
    losses = [torch.ones(5), torch.ones(3)]
    assert float(step_loss(losses, law)) == 0.375


def test_case_a10_masked_places_give_exactly_no_gradient():
    masks = [mask(0, 1, 0), mask(0, 1, 0)]
    losses = [
        torch.tensor([0.0, 3, 50], requires_grad=True),
        torch.tensor([0.0, 5, float("inf")], requires_grad=True),
    ]
    law = loss_weights(masks, microbatches=[[0], [1]], mode="global-token-mean")
    loss = sum(
        (torch.where(w > 0, value, 0.0) * w).sum()
        for w, value in zip(law.weights, losses, strict=True)
    ) / torch.tensor(law.total)
    loss.backward()
    assert float(loss.detach()) == 4.0
    assert [value.grad.tolist() for value in losses] == [[0, 0.5, 0], [0, 0.5, 0]]


def test_case_a13_an_all_masked_microbatch_adds_nothing():
    masks = [mask(0, 0, 0), mask(0, 1, 1)]
    for mode in MODES:
        extra = options(mode, [turns_from_mask(m) for m in masks])
        law = loss_weights(masks, microbatches=[[1], [0]], mode=mode, **extra)
        assert (law.counts[1], law.weights[0].tolist()) == (0, [0, 0, 0])


def test_the_articles_three_denominators_of_the_sample_mean():
    """None, GBS and GBS_true; an untrained sample is in the fixed GBS but not in GBS_true."""
    masks = [mask(0, 1, 1), mask(0, 1), mask(0, 0)]
    microbatches = [[0], [1, 2]]
    for size, want in ((1, [1, 0]), (3, [3, 0]), (None, [1, 1])):
        law = loss_weights(
            masks, microbatches=microbatches, mode="sample-mean", global_batch_size=size
        )
        assert law.counts == want
        assert [w.tolist() for w in law.weights] == [[0, 0.5, 0.5], [0, 1], [0, 0]]


def test_the_first_token_is_never_trained_and_never_counted():
    law = loss_weights([mask(1, 1), mask(1)], microbatches=[[0, 1]], mode="global-token-mean")
    assert law.counts == [1]
    assert [w.tolist() for w in law.weights] == [[0, 1], [0]]


def test_turns_with_the_same_id_elsewhere_are_other_turns():
    turn_ids = [torch.tensor([-1, 0, 0, -1, 1]), torch.tensor([-1, 0])]
    law = loss_weights(
        [mask(0, 1, 1, 0, 1), mask(0, 1)],
        microbatches=[[0, 1]],
        mode="turn-mean",
        turn_ids=turn_ids,
    )
    assert law.counts == [3]
    assert [w.tolist() for w in law.weights] == [[0, 0.5, 0.5, 0, 1], [0, 1]]


def test_seed_token_weights_of_a_mean_of_microbatch_means():
    weights = local_mean_token_weights([96, 112, 180, 355])
    assert [f"{w:.2f}" for w in weights] == ["1.93", "1.66", "1.03", "0.52"]
    assert local_mean_token_weights([3, 3]) == [1, 1]


def test_a_mean_of_microbatch_means_is_the_row_mean_and_weighs_tokens_as_stated():
    """The gradient says it too: a token of each microbatch against the same in a global mean."""
    masks = [mask(0, *[1] * n) for n in (2, 1, 4, 1)]
    microbatches = [[0, 1], [2], [3]]
    losses = [torch.rand(len(m), dtype=torch.float64).requires_grad_() for m in masks]
    law = loss_weights(masks, microbatches=microbatches, mode="row-mean", dtype=torch.float64)
    local = local_mean_loss(losses, masks, microbatches=microbatches)
    assert_close(step_loss(losses, law), local, rtol=1e-12, atol=0)
    tokens = law.num_trained
    per_token = [g[1] * sum(tokens) for g in torch.autograd.grad(local, losses)]
    stated = local_mean_token_weights(tokens)
    wanted = [stated[m] for m, members in enumerate(microbatches) for _ in members]
    assert [float(x) for x in per_token] == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("mode", "extra", "message"),
    [
        ("mean", {}, "--loss-normalization mean is unknown: use one of token-sum"),
        ("token-sum", {}, "token-sum needs a fixed global_batch_size"),
        ("turn-mean", {}, "turn-mean needs turn_ids"),
        ("constant", {"max_length": 0}, "--loss-normalization-max-length of at least 1, got 0"),
        ("row-mean", {"global_batch_size": 4}, "row-mean divides by what it counts"),
        ("sample-mean", {"global_batch_size": 0}, "global_batch_size 0 must be at least 1"),
    ],
)
def test_options_that_do_not_fit_are_refused(mode, extra, message):
    with pytest.raises(ValueError, match=message):
        loss_weights([mask(0, 1)], microbatches=[[0]], mode=mode, **extra)


@pytest.mark.parametrize(
    ("microbatches", "turn_ids", "message"),
    [
        ([[0], [0]], [[-1, 0]], "sequence 0 twice"),
        ([[1]], [[-1, 0]], "name sequence 1, but there are 1"),
        ([[0]], [[-1]], "sequence 0: turn_ids"),
        ([[0]], [[-1, -1]], "outside every turn"),
        ([[0]], [], "0 turn_ids for 1 masks"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(microbatches, turn_ids, message):
    with pytest.raises(ValueError, match=message):
        loss_weights(
            [mask(0, 1)],
            microbatches=microbatches,
            mode="turn-mean",
            turn_ids=[torch.tensor(ids) for ids in turn_ids],
        )


def test_a_fixed_count_needs_a_microbatch_to_carry_it():
    with pytest.raises(ValueError, match="at least a filler"):
        loss_weights([], microbatches=[], mode="token-sum", global_batch_size=4)
