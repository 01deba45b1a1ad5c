"""Windows score every token once; means and differences are those of a plain loop."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.evaluation.perplexity import (
    TokenScores,
    clustered_mean,
    join_scores,
    mean_nll,
    paired_difference,
    read_scores,
    sliding_windows,
)


@given(
    num_tokens=st.integers(2, 90),
    window=st.integers(2, 40),
    share=st.floats(0, 1),
    most=st.none() | st.integers(1, 5),
)
def test_windows_score_tokens_once(num_tokens: int, window: int, share: float, most: int | None):
    stride = max(round(share * window), 1)
    windows = sliding_windows(num_tokens, window=window, stride=stride, max_windows=most)
    scored = [t for w in windows for t in range(w.scored_from, w.end)]
    assert scored == sorted(set(scored))
    assert all(0 <= w.start < w.scored_from < w.end <= num_tokens for w in windows)
    assert all(w.end - w.start <= window and w.start % stride == 0 for w in windows)
    later = [t - w.start for w in windows[1:] for t in range(w.scored_from, w.end)]
    assert min(later, default=window) >= max(window - stride, 1)
    if most is None and stride < window:
        assert scored == list(range(1, num_tokens))
    elif most is None:
        assert scored == [t for t in range(num_tokens) if t % window]
    else:
        whole = sliding_windows(num_tokens, window=window, stride=stride)
        assert windows == whole[:most]


def test_windows_that_do_not_fit_are_refused_together():
    with pytest.raises(ValueError, match=r"(?s)--stride 9 .*--max-windows 0 .*has 1 tokens"):
        sliding_windows(1, window=8, stride=9, max_windows=0)


def scores(*, seed: int, shift: float = 0.0) -> TokenScores:
    """Forty tokens in five windows; the text is the same for every seed."""
    text = torch.rand(41, generator=torch.Generator().manual_seed(0))
    noise = torch.rand(41, generator=torch.Generator().manual_seed(seed))
    windows = sliding_windows(41, window=9, stride=8)
    parts = [
        (torch.arange(w.scored_from, w.end), (10 * text + noise + shift)[w.scored_from : w.end])
        for w in reversed(windows)  # ranks come in any order
    ]
    return join_scores(parts, tokens=torch.arange(41) % 7, windows=windows)


def test_standard_error_is_that_of_window_means():
    """With windows of equal size it is the plain standard error of the windows' means."""
    found = mean_nll(scores(seed=1))
    means = [float(part.double().mean()) for part in scores(seed=1).nll.split(8)]
    assert found.num_tokens == 40 and found.num_windows == 5
    assert found.value == pytest.approx(statistics.mean(means), rel=1e-12)
    assert found.standard_error == pytest.approx(statistics.stdev(means) / 5**0.5, rel=1e-12)


def test_a_single_window_has_no_standard_error():
    found = clustered_mean(torch.ones(3), window=torch.zeros(3, dtype=torch.int64))
    assert found.value == 1 and math.isnan(found.standard_error)


def test_pairing_takes_out_the_difficulty_of_the_text():
    better, worse = scores(seed=1), scores(seed=2, shift=0.5)
    found = paired_difference(better, worse)
    assert found.value == pytest.approx(mean_nll(better).value - mean_nll(worse).value, rel=1e-5)
    assert found.value < -4 * found.standard_error
    assert 3 * found.standard_error < mean_nll(better).standard_error


def test_scores_of_other_tokens_are_refused():
    other = scores(seed=1)
    changed = TokenScores(
        index=other.index, token=other.token + 1, window=other.window, nll=other.nll
    )
    with pytest.raises(ValueError, match="differ in token"):
        paired_difference(other, changed)


def test_file_holds_the_scores(tmp_path: Path):
    scores(seed=3).save(tmp_path / "scores.npz")
    again = read_scores(tmp_path / "scores.npz")
    for name in ("index", "token", "window", "nll"):
        assert torch.equal(getattr(again, name), getattr(scores(seed=3), name))


@pytest.mark.parametrize("content", [None, b"", b"no archive"])
def test_other_files_are_refused(tmp_path: Path, content: bytes | None):
    path = tmp_path / "other.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"--compare .*other\.npz"):
        read_scores(path)
