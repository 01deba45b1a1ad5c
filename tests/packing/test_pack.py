"""Packing against the naive first fit, and the numbers of seed 000 out of our functions."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.packing import pack, padding_share, token_budget_batches
from megatron_ext.packing.pack import fit_lengths
from tests.references import first_fit_decreasing, padded_budget
from tools.benchmarks.lengths import AGENT_BUDGET, agent_lengths


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_pack_is_the_naive_first_fit(data):
    capacity = data.draw(st.integers(1, 40))
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=60))
    max_segments = data.draw(st.none() | st.integers(1, 5))
    rows = pack(lengths, capacity, max_segments=max_segments)
    assert rows == first_fit_decreasing(lengths, capacity, max_segments=max_segments)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=40), st.integers(50, 200))
def test_token_budget_is_the_seeds_loop(lengths, max_tokens):
    assert token_budget_batches(lengths, max_tokens) == padded_budget(lengths, max_tokens)


def test_seed_numbers_of_padding_budget_and_rows():
    """Padding 59.3 % random, 3.6 % sorted; 51 microbatches at 3.0 %; 46 rows (bound 45.47)."""
    lengths, random_order = agent_lengths()
    by_length = sorted(range(512), key=lengths.__getitem__)
    eights, sorted_eights = (
        [order[i : i + 8] for i in range(0, 512, 8)] for order in (random_order, by_length)
    )
    budget = token_budget_batches(lengths, AGENT_BUDGET)
    rows = pack(lengths, AGENT_BUDGET)
    assert f"{padding_share(lengths, eights):.1%}" == "59.3%"
    assert f"{padding_share(lengths, sorted_eights):.1%}" == "3.6%"
    assert (len(budget), f"{padding_share(lengths, budget):.1%}") == (51, "3.0%")
    assert round(sum(lengths) / AGENT_BUDGET, 2) == 45.47
    assert len(rows) == 46
    assert f"{padding_share(lengths, rows, row_length=AGENT_BUDGET):.1%}" == "1.2%"


def test_a_hundred_thousand_lengths_take_under_two_seconds():
    lengths = torch.randint(1, 4097, (100_000,), generator=torch.Generator().manual_seed(1))
    start = time.process_time()  # of this process: other load on the machine does not count
    rows = pack(lengths, 4096)
    assert time.process_time() - start < 2
    assert sum(map(len, rows)) == 100_000


def test_nothing_to_pack_is_an_empty_result():
    assert pack([], 8) == []
    assert token_budget_batches([], 8) == []
    assert padding_share([], []) == 0.0


def test_too_long_names_index_length_and_flag():
    for group in (pack, token_budget_batches):
        with pytest.raises(ValueError, match=r"sequence 1 has 9 tokens.*--max-tokens-per-mic.* 8"):
            group([3, 9, 2], 8)
        with pytest.raises(ValueError, match=r"--seq-length 8 \(2 of 3 are too long\)"):
            group([3, 9, 12], 8, flag="--seq-length")


def test_overlong_is_cut_or_dropped_and_counted():
    assert pack([3, 9, 2], 8, overlong="truncate") == [[1], [0, 2]]
    assert pack([3, 9, 2], 8, overlong="drop") == [[0, 2]]
    assert token_budget_batches([3, 9, 2], 8, overlong="drop") == [[0, 2]]
    cut = fit_lengths([3, 9, 2], 8, overlong="truncate")
    assert (cut.lengths, cut.num_truncated, cut.num_dropped) == ([3, 8, 2], 1, 0)
    dropped = fit_lengths([3, 9, 2], 8, overlong="drop")
    assert (dropped.lengths, dropped.num_truncated, dropped.num_dropped) == ([3, 0, 2], 0, 1)


@pytest.mark.parametrize(
    ("lengths", "capacity", "message"),
    [
        ([3, 0], 8, "sequence 1 has length 0"),
        ([-2], 8, "sequence 0 has length -2"),
        ([1], 0, "--max-tokens-per-microbatch 0"),
        ([], -1, "--max-tokens-per-microbatch -1"),
    ],
)
def test_bad_lengths_and_capacities_are_refused(lengths, capacity, message):
    for group in (pack, token_budget_batches):
        with pytest.raises(ValueError, match=message):
            group(lengths, capacity)


def test_unknown_choices_are_refused():
    with pytest.raises(ValueError, match="--overlong cut is unknown"):
        pack([1], 8, overlong="cut")
    with pytest.raises(ValueError, match="max_segments 0"):
        pack([1], 8, max_segments=0)
    with pytest.raises(TypeError):
        pack([1.5], 8)
