"""Options that do not fit together are named with their remedy, all at once."""

import pytest

from megatron_ext.packing import PackingConfig


def test_defaults_change_nothing_and_have_no_problem():
    config = PackingConfig()
    assert not config.packing
    assert config.problems(seq_length=128, sequence_multiple=8) == []
    assert config.fixed_denominator(global_batch_size=64) is None


def test_row_capacity_defaults_to_the_sequence_length():
    assert PackingConfig(packing=True).row_capacity(seq_length=128) == 128
    config = PackingConfig(packing=True, max_tokens_per_microbatch=512)
    assert config.row_capacity(seq_length=128) == 512


def test_fixed_denominators():
    def fixed(mode, denominator):
        config = PackingConfig(loss_normalization=mode, loss_denominator=denominator)
        return config.fixed_denominator(global_batch_size=64)

    assert fixed("token-sum", "counted") == 64
    assert fixed("token-sum", "one") == 1
    assert fixed("sample-mean", "counted") is None
    assert fixed("sample-mean", "global-batch-size") == 64
    assert fixed("sample-mean", "one") == 1


def test_all_problems_are_listed():
    config = PackingConfig(
        max_sequences_per_row=4,
        loss_normalization="constant",
    )
    problems = config.problems(seq_length=128)
    assert len(problems) == 2
    assert "--loss-normalization-max-length" in problems[0]
    assert "--max-sequences-per-row needs --packing" in problems[1]
    with pytest.raises(ValueError, match=r"--balance-attention-weight -1\.0 must be at least 0"):
        PackingConfig(balance_attention_weight=-1.0)


def test_denominator_and_capacity_that_do_not_fit():
    config = PackingConfig(
        packing=True,
        pad_rows_to_capacity=True,
        loss_normalization="turn-mean",
        loss_denominator="one",
    )
    denominator, capacity = config.problems(seq_length=9, sequence_multiple=2)
    assert "--loss-denominator one does not fit --loss-normalization turn-mean" in denominator
    assert "Use --max-tokens-per-microbatch 8 or 10" in capacity
