"""Perplexity over sliding windows, its standard error, and two models on the same tokens.

Idea: a text of n tokens is cut into windows; each scores the tokens that no window before it has
scored, so that a stride below the window gives every token at least window - stride of context.
Invariant the tests check: no token is scored twice, and with stride < window all but the first are.
Standard errors treat windows, not tokens, as the independent draws: tokens of one passage are alike
(Miller 2024, "Adding error bars to evals", clustered errors).
Not covered: running a model (upstream/evaluate.py).

Legend: N scored tokens.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_COLUMNS = ("index", "token", "window", "nll")


@dataclass(frozen=True, kw_only=True)
class Window:
    """Tokens [start, end) of a text, of which [scored_from, end) are scored."""

    start: int
    end: int
    scored_from: int


def sliding_windows(
    num_tokens: int, *, window: int, stride: int, max_windows: int | None = None
) -> list[Window]:
    """Windows of at most `window` tokens that start every `stride` tokens, up to the text's end.

    A window's first token is context only, so that stride = window leaves out one of each window.

    Raises:
        ValueError: the sizes do not fit each other, or the text has nothing to score.
    """
    wrong = []
    if window < 2:
        wrong.append(f"--window {window} predicts nothing: use 2 or more tokens.")
    if not 1 <= stride <= max(window, 1):
        wrong.append(
            f"--stride {stride} must be from 1 to --window {window}: a longer one skips tokens."
        )
    if max_windows is not None and max_windows < 1:
        wrong.append(f"--max-windows {max_windows} leaves nothing: use 1 or more, or drop it.")
    if num_tokens < 2:
        wrong.append(f"the text has {num_tokens} tokens: nothing to predict, use a longer one.")
    if wrong:
        raise ValueError("\n  ".join(wrong))
    windows: list[Window] = []
    end = 0
    for start in range(0, num_tokens, stride):
        if end == num_tokens or len(windows) == max_windows:
            break
        scored_from, end = max(end, start + 1), min(start + window, num_tokens)
        if scored_from < end:
            windows.append(Window(start=start, end=end, scored_from=scored_from))
    return windows


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """The negative log-likelihood of every scored token of a text, by its place."""

    index: Tensor
    """Place of each token in the text, ascending, int64 [N]."""
    token: Tensor
    """Its id, int64 [N]."""
    window: Tensor
    """Number of the window that scored it, int64 [N]."""
    nll: Tensor
    """-log p(token | what the window has before it), nats, float32 [N]."""

    def save(self, path: Path) -> None:
        """Write an npz file with one array per field."""
        with path.open("wb") as file:
            np.savez(file, **{name: getattr(self, name).numpy() for name in _COLUMNS})


def read_scores(path: Path) -> TokenScores:
    """What `TokenScores.save` wrote.

    Raises:
        ValueError: it is no such file.
    """
    try:
        with np.load(path) as arrays:
            columns = {name: torch.from_numpy(arrays[name]) for name in _COLUMNS}
    except (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"--compare {path} is no file that --tokens-out wrote: {error}. Score the other "
            "checkpoint with --tokens-out first."
        ) from error
    return TokenScores(**columns)


@dataclass(frozen=True, kw_only=True)
class Mean:
    """A mean over tokens."""

    value: float
    standard_error: float
    """By windows; nan with a single window."""
    num_tokens: int
    num_windows: int


def clustered_mean(values: Tensor, *, window: Tensor) -> Mean:
    """The mean of per-token values [N], its standard error with the windows as clusters."""
    wide = values.double()
    mean = wide.mean()
    _, cluster = window.unique(return_inverse=True)
    count = int(cluster.max()) + 1
    sums = torch.zeros(count, dtype=torch.float64).index_add_(0, cluster, wide - mean)
    error = math.nan
    if count > 1:
        error = math.sqrt(count / (count - 1) * float(sums.square().sum())) / len(values)
    return Mean(value=float(mean), standard_error=error, num_tokens=len(values), num_windows=count)


def mean_nll(scores: TokenScores) -> Mean:
    """Nats per token; `math.exp` of its value is the perplexity."""
    return clustered_mean(scores.nll, window=scores.window)


def paired_difference(scores: TokenScores, other: TokenScores) -> Mean:
    """Mean of (scores - other) per token: negative when `scores` is the better model.

    The text's difficulty cancels, which makes the standard error far smaller than that of each.

    Raises:
        ValueError: they are not of the same tokens in the same windows.
    """
    same = {name: torch.equal(getattr(scores, name), getattr(other, name)) for name in _COLUMNS[:3]}
    if not all(same.values()):
        differing = ", ".join(name for name, is_same in same.items() if not is_same)
        raise ValueError(
            f"the two files differ in {differing} ({len(scores.nll)} and {len(other.nll)} tokens): "
            "score both checkpoints on the same text with the same tokenizer, --window, --stride "
            "and --max-windows."
        )
    return clustered_mean(scores.nll.double() - other.nll.double(), window=scores.window)


def join_scores(
    parts: Sequence[tuple[Tensor, Tensor]], *, tokens: Tensor, windows: Sequence[Window]
) -> TokenScores:
    """The scores of a text from (index [n], nll [n]) in any order, as ranks computed them."""
    index = torch.cat([index for index, _ in parts])
    nll = torch.cat([nll for _, nll in parts])
    index, order = index.sort()
    expected = torch.cat([torch.arange(w.scored_from, w.end) for w in windows])
    assert torch.equal(index, expected), "every token of the windows is scored once"
    starts = torch.tensor([w.scored_from for w in windows])
    return TokenScores(
        index=index,
        token=tokens[index],
        window=torch.searchsorted(starts, index, right=True) - 1,
        nll=nll[order],
    )
