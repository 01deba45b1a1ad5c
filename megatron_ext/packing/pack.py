"""Which sequences share a row or a microbatch: first-fit decreasing, and the padded token budget.

Invariants the tests check: every sequence exactly once, no row over its capacity, rows equal to the
naive first fit (a segment tree finds the first row in O(log rows)), the seed's numbers.
Not covered: which rank runs what (`balance.py`), tensors (`batch.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

from torch import Tensor

from megatron_ext.packing.config import Overlong

CAPACITY_FLAG = "--max-tokens-per-microbatch"


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Lengths after the overlong rule, under the same indices."""

    lengths: list[int]
    """Tokens kept of each sequence; 0 = dropped."""
    num_truncated: int
    """Sequences cut to the limit."""
    num_dropped: int
    """Sequences left out."""


def pack(
    lengths: Sequence[int] | Tensor,
    capacity: int,
    *,
    overlong: Overlong = "error",
    max_segments: int | None = None,
    flag: str = CAPACITY_FLAG,
) -> list[list[int]]:
    """First-fit decreasing: rows of sequence indices, each row at most `capacity` tokens.

    Longest first, equal lengths in index order; each goes into the first row with room.
    max_segments: most sequences in a row.  overlong and flag: see `fit_lengths`; "truncate" packs a
    long sequence as `capacity` tokens, "drop" leaves its index out of the rows.
    """
    if max_segments is not None and max_segments < 1:
        raise ValueError(f"max_segments {max_segments} leaves no room in a row: use 1 or more.")
    fitted = fit_lengths(lengths, capacity, overlong=overlong, flag=flag).lengths
    order = _longest_first(fitted)
    if not order:
        return []
    bound = 2 * sum(fitted) // capacity + 1 + (len(order) // max_segments if max_segments else 0)
    leaves = 1 << (min(bound, len(order)) - 1).bit_length()
    # A full binary tree of free tokens: leaf leaves + r is row r, a parent holds the larger child.
    # Rows not yet opened are leaves with everything free, so a fitting leaf always exists.
    # No two sequences above half the capacity share a row: each opens its own.
    rows = [[i] for i in order if 2 * fitted[i] > capacity]
    free = [capacity] * (2 * leaves)
    for r, (i,) in enumerate(rows):
        free[leaves + r] = 0 if max_segments == 1 else capacity - fitted[i]
    for node in range(leaves - 1, 0, -1):
        free[node] = max(free[2 * node], free[2 * node + 1])
    for i in order[len(rows) :]:
        node = _first_leaf_with_room(free, fitted[i])
        if node - leaves == len(rows):
            rows.append([])
        row = rows[node - leaves]
        row.append(i)
        _set_leaf(free, node, 0 if len(row) == max_segments else free[node] - fitted[i])
    return rows


def token_budget_batches(
    lengths: Sequence[int] | Tensor,
    max_tokens: int,
    *,
    overlong: Overlong = "error",
    flag: str = CAPACITY_FLAG,
) -> list[list[int]]:
    """Microbatches of padded rows: sequence indices with count * longest <= max_tokens.

    Longest first, so the first member sets the width and neighbours are of similar length.
    """
    fitted = fit_lengths(lengths, max_tokens, overlong=overlong, flag=flag).lengths
    batches: list[list[int]] = []
    for i in _longest_first(fitted):
        if batches and (len(batches[-1]) + 1) * fitted[batches[-1][0]] <= max_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def fit_lengths(
    lengths: Sequence[int] | Tensor,
    limit: int,
    *,
    overlong: Overlong = "error",
    flag: str = CAPACITY_FLAG,
) -> Fitted:
    """Apply the overlong rule: each length at most `limit`, with the counts of what was changed.

    flag: the option that set the limit, for the message.
    Raises ValueError for a limit below 1, for lengths below 1, and, with overlong="error", for
    sequences longer than the limit (the first one by index and length, and how many there are).
    """
    if overlong not in ("error", "truncate", "drop"):
        raise ValueError(f"--overlong {overlong} is unknown: use error, truncate or drop.")
    if limit < 1:
        raise ValueError(f"{flag} {limit} leaves no room for a token: use 1 or more.")
    values = [index(n) for n in (lengths.tolist() if isinstance(lengths, Tensor) else lengths)]
    empty = next((i for i, n in enumerate(values) if n < 1), None)
    if empty is not None:
        raise ValueError(
            f"sequence {empty} has length {values[empty]}: every sequence needs at least one token."
        )
    too_long = [i for i, n in enumerate(values) if n > limit]
    if too_long and overlong == "error":
        first = too_long[0]
        more = f" ({len(too_long)} of {len(values)} are too long)" if len(too_long) > 1 else ""
        raise ValueError(
            f"sequence {first} has {values[first]} tokens, more than {flag} {limit}{more}. "
            f"Use {flag} {max(values)}, or --overlong truncate or drop."
        )
    for i in too_long:
        values[i] = limit if overlong == "truncate" else 0
    cut = overlong == "truncate"
    return Fitted(
        lengths=values,
        num_truncated=len(too_long) if cut else 0,
        num_dropped=0 if cut else len(too_long),
    )


def padding_share(
    lengths: Sequence[int] | Tensor,
    batches: Sequence[Sequence[int] | Tensor],
    *,
    row_length: int | None = None,
) -> float:
    """Share of the computed positions that hold no token, 0 to 1.

    row_length: batches are packed rows of this fixed length; None = padded microbatches, each as
    wide as its longest member.
    """
    sizes = lengths.tolist() if isinstance(lengths, Tensor) else lengths
    members = [[sizes[int(i)] for i in batch] for batch in batches]
    real = sum(map(sum, members))
    if row_length is None:
        positions = sum(len(batch) * max(batch, default=0) for batch in members)
    else:
        positions = row_length * len(members)
    return 1 - real / positions if positions else 0.0


def _first_leaf_with_room(free: list[int], length: int) -> int:
    """Node of the leftmost leaf with at least `length` free; free[1] must have it."""
    leaves = len(free) // 2
    node = 1
    while node < leaves:
        node *= 2
        if free[node] < length:
            node += 1
    return node


def _set_leaf(free: list[int], node: int, value: int) -> None:
    """Write a leaf and the larger child into every parent that changes."""
    free[node] = value
    while node > 1:
        node //= 2
        left, right = free[2 * node], free[2 * node + 1]
        larger = left if left > right else right
        if free[node] == larger:
            break
        free[node] = larger


def _longest_first(fitted: list[int]) -> list[int]:
    """Indices of the kept sequences, longest first, ties in index order."""
    return sorted((i for i, n in enumerate(fitted) if n), key=lambda i: -fitted[i])
