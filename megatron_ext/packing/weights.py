"""The one law of loss normalisation: the loss of a step is (1 / N) * sum_t w_t * l_t.

Idea: the sum is over all tokens of all microbatches and ranks; w_t and the integer each microbatch
adds to N come from lengths, masks and turns alone, once per step, before the first forward; every
objective (policy, KL, entropy, distillation) uses them.
Invariants the tests check: any packing, budget and rank layout gives the loss of the plain formula.
Not covered: dividing by N (Megatron does, from the counts) and shifting to labels (`batch.py`).

    mode               w_t                               adds to N
    token-sum          1                                 0, and the fixed batch size once
    global-token-mean  1                                 trained tokens
    row-mean           1 / trained tokens of its row     rows
    sample-mean        1 / trained tokens of its sample  samples (or the fixed batch size, once)
    turn-mean          1 / trained tokens of its turn    turns
    constant           1 / max_length                    samples (or the fixed batch size, once)

A token is trained if its mask is set and it has a predecessor that predicts it: the first token of
a sequence never counts.  Rows, samples and turns without a trained token do not count either; a
fixed batch size is N whatever the masks are, so there an untrained sample is a zero in the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from megatron_ext.packing.config import FIXED_DENOMINATOR_MODES, LossNormalization


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """The law for one step, as far as the given microbatches go."""

    weights: list[Tensor]
    """w_t of every sequence [n], aligned with its tokens; 0 where nothing is trained."""
    counts: list[int]
    """What each microbatch adds to N."""
    num_trained: list[int]
    """Trained tokens of each microbatch."""

    @property
    def total(self) -> int:
        """N of these microbatches: what the counts seen at run time must add up to."""
        return sum(self.counts)


def loss_weights(
    masks: Sequence[Tensor],
    *,
    microbatches: Sequence[Sequence[int]],
    mode: LossNormalization,
    packed: bool = True,
    turn_ids: Sequence[Tensor] | None = None,
    max_length: int | None = None,
    global_batch_size: int | None = None,
    counts_global_batch: bool = True,
    dtype: torch.dtype = torch.float32,
) -> LossWeights:
    """Weights of every sequence in `masks` and counts of every microbatch.

    masks: [n] per sequence, non-zero = trained, aligned with its tokens.
    microbatches: sequence indices; [] is a filler, and a sequence in none of them keeps weight 0.
    packed: a microbatch is one row; else each of its sequences is a row (row-mean only).
    turn_ids: [n] per sequence, equal ids = one turn, negative = none (turn-mean only).
    max_length: tokens (constant only).
    global_batch_size: fixed N; required by token-sum, optional in sample-mean and constant (1 =
    plain sum).  The first microbatch carries it, so when each data-parallel rank calls this for its
    own microbatches, exactly one of them passes counts_global_batch=True.
    """
    _check_options(mode, turn_ids, max_length, global_batch_size)
    _check_inputs(masks, microbatches, turn_ids if mode == "turn-mean" else None)
    trained = [_trained(mask) for mask in masks]
    tokens = [int(t.sum()) for t in trained]
    weights = [torch.zeros(len(mask), dtype=dtype) for mask in masks]
    counts = []
    for microbatch in microbatches:
        rows = [microbatch] if packed else [[i] for i in microbatch]
        count = 0
        for row in rows:
            row_tokens = sum(tokens[i] for i in row)
            count += int(mode == "row-mean" and row_tokens > 0)
            for i in row:
                denominator, units = _sample_law(
                    trained[i],
                    mode=mode,
                    row_tokens=row_tokens,
                    turn_ids=turn_ids[i] if turn_ids is not None else None,
                    max_length=max_length,
                )
                weights[i] = torch.where(trained[i], 1 / denominator, 0.0).to(dtype)
                count += units
        counts.append(count)
    if global_batch_size is not None:
        counts = _fixed_counts(len(counts), global_batch_size if counts_global_batch else 0)
    num_trained = [sum(tokens[i] for i in microbatch) for microbatch in microbatches]
    return LossWeights(weights=weights, counts=counts, num_trained=num_trained)


def local_mean_token_weights(trained_tokens: Sequence[int]) -> list[float]:
    """What a mean of microbatch means weighs a token of each microbatch; 1 in a global mean.

    The common mistake, kept to show its size: 1 everywhere only if the microbatches are equal.
    """
    total, count = sum(trained_tokens), len(trained_tokens)
    return [total / (count * n) if n else 0.0 for n in trained_tokens]


def turns_from_mask(mask: Tensor) -> Tensor:
    """Turn ids [n]: each run of trained tokens is a turn, -1 between; for data without roles."""
    trained = mask != 0
    starts = trained & ~torch.cat([trained.new_zeros(1), trained[:-1]])
    return torch.where(trained, starts.cumsum(0) - 1, -1)


def _trained(mask: Tensor) -> Tensor:
    """Tokens that count: masked in, and not the first, which nothing predicts."""
    trained = mask != 0
    trained[:1] = False
    return trained


def _sample_law(
    trained: Tensor,
    *,
    mode: LossNormalization,
    row_tokens: int,
    turn_ids: Tensor | None,
    max_length: int | None,
) -> tuple[Tensor, int]:
    """1 / w_t of one sequence (float64, broadcasts to [n]) and the units it adds to N."""
    tokens = int(trained.sum())
    denominator, units = 1, 0
    match mode:
        case "token-sum":
            pass
        case "global-token-mean":
            units = tokens
        case "row-mean":
            denominator = max(row_tokens, 1)
        case "sample-mean":
            denominator, units = max(tokens, 1), int(tokens > 0)
        case "constant":
            assert max_length is not None, "checked with the options"
            denominator, units = max_length, int(tokens > 0)
        case "turn-mean":
            assert turn_ids is not None, "checked with the options"
            return _turn_law(trained, turn_ids)
    return torch.tensor(denominator, dtype=torch.float64), units


def _turn_law(trained: Tensor, turn_ids: Tensor) -> tuple[Tensor, int]:
    """Trained tokens of each token's turn [n], and the number of turns with a trained token."""
    _, turn_of_trained, sizes = turn_ids[trained].unique(return_inverse=True, return_counts=True)
    denominator = torch.ones(len(trained), dtype=torch.float64)
    denominator[trained] = sizes[turn_of_trained].double()
    return denominator, len(sizes)


def _fixed_counts(num_microbatches: int, global_batch_size: int) -> list[int]:
    """The fixed N on the first microbatch, 0 on the others."""
    if global_batch_size and not num_microbatches:
        raise ValueError(
            f"global_batch_size {global_batch_size} has no microbatch to count it: "
            "give this rank at least a filler."
        )
    return [global_batch_size if m == 0 else 0 for m in range(num_microbatches)]


def _check_options(
    mode: str,
    turn_ids: Sequence[Tensor] | None,
    max_length: int | None,
    global_batch_size: int | None,
) -> None:
    """Refuse a mode without what it divides by, or with what it would ignore."""
    if mode not in get_args(LossNormalization):
        known = ", ".join(get_args(LossNormalization))
        raise ValueError(f"--loss-normalization {mode} is unknown: use one of {known}.")
    problems = []
    if mode == "turn-mean" and turn_ids is None:
        problems.append("turn-mean needs turn_ids (see turns_from_mask for data without roles)")
    if mode == "constant" and (max_length is None or max_length < 1):
        problems.append(
            f"constant needs --loss-normalization-max-length of at least 1, got {max_length}"
        )
    if mode == "token-sum" and global_batch_size is None:
        problems.append("token-sum needs a fixed global_batch_size (1 = plain sum)")
    if global_batch_size is not None:
        if mode not in FIXED_DENOMINATOR_MODES:
            allowed = ", ".join(FIXED_DENOMINATOR_MODES)
            problems.append(
                f"{mode} divides by what it counts: global_batch_size {global_batch_size} "
                f"fits only {allowed}"
            )
        elif global_batch_size < 1:
            problems.append(f"global_batch_size {global_batch_size} must be at least 1")
    if problems:
        raise ValueError(f"--loss-normalization: {'; '.join(problems)}.")


def _check_inputs(
    masks: Sequence[Tensor],
    microbatches: Sequence[Sequence[int]],
    turn_ids: Sequence[Tensor] | None,
) -> None:
    """Refuse indices outside the masks or given twice, and turn ids that do not match the masks."""
    seen: set[int] = set()
    for i in (i for microbatch in microbatches for i in microbatch):
        if not 0 <= i < len(masks):
            raise ValueError(f"microbatches name sequence {i}, but there are {len(masks)} masks.")
        if i in seen:
            raise ValueError(f"microbatches name sequence {i} twice: it would be trained twice.")
        seen.add(i)
    if turn_ids is None:
        return
    if len(turn_ids) != len(masks):
        raise ValueError(f"{len(turn_ids)} turn_ids for {len(masks)} masks: give one per sequence.")
    for i, (mask, turns) in enumerate(zip(masks, turn_ids, strict=True)):
        if mask.shape != turns.shape:
            raise ValueError(
                f"sequence {i}: turn_ids {list(turns.shape)} and mask {list(mask.shape)} differ."
            )
        if bool((_trained(mask) & (turns < 0)).any()):
            raise ValueError(f"sequence {i} trains a token outside every turn (turn id below 0).")
