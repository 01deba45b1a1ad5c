"""From sequences to the microbatch one forward consumes, packed or padded.

Legend: n tokens of one sequence, B rows, S positions of a row.
Conventions: everything a caller gives is aligned with tokens (value t belongs to token t, like its
log-prob given its prefix; the first token's is never used).  A microbatch holds labels, weights and
extras where they are predicted: position p of a sequence carries what belongs to its token p + 1,
and the last position of every sequence carries zeros, so nothing crosses a border.
Not covered: which sequences go together (`pack.py`, `balance.py`), context-parallel splits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from megatron_ext.packing.config import Overlong
from megatron_ext.packing.pack import CAPACITY_FLAG, Fitted, fit_lengths
from megatron_ext.packing.types import Microbatch
from megatron_ext.packing.weights import LossWeights


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One training sequence, everything aligned with its tokens."""

    tokens: Tensor
    """Token ids, int64 [n], n >= 1."""
    mask: Tensor
    """Which tokens are trained, bool [n]."""
    turn_ids: Tensor | None = None
    """Turn of each token, int64 [n], -1 = none."""
    extras: dict[str, Tensor] = field(default_factory=dict)
    """More per-token values [n] a loss needs (old log-probs, advantages, ...)."""

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or len(self.tokens) == 0:
            raise ValueError(f"tokens have shape {list(self.tokens.shape)}: need [n] with n >= 1.")
        wrong = [
            f"{name} {list(values.shape)}"
            for name, values in self._aligned().items()
            if values.shape != self.tokens.shape
        ]
        if wrong:
            raise ValueError(
                f"{', '.join(wrong)} must have one value per token, as tokens "
                f"{list(self.tokens.shape)}."
            )

    def truncated(self, length: int) -> Sample:
        """The first `length` tokens."""
        return replace(
            self,
            tokens=self.tokens[:length],
            mask=self.mask[:length],
            turn_ids=None if self.turn_ids is None else self.turn_ids[:length],
            extras={name: values[:length] for name, values in self.extras.items()},
        )

    def _aligned(self) -> dict[str, Tensor]:
        turns = {} if self.turn_ids is None else {"turn_ids": self.turn_ids}
        return {"mask": self.mask, **turns, **self.extras}


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """How the rows of a step's microbatches are shaped, fillers included."""

    packed: bool = True
    """One packed row with cu_seqlens; else one padded row per sequence."""
    pad_to_multiple: int = 1
    """Row lengths are multiples of this (the tensor-parallel size under sequence parallelism)."""
    capacity: int | None = None
    """Fixed row length; None = as long as needed."""
    max_segments: int | None = None
    """Most sequences in a packed row; cu_seqlens then always has max_segments + 2 entries (one more
    segment for the padding, unused ones empty at the end).  None = as many entries as needed."""
    pad_token: int = 0
    """Id at padded positions and as label where nothing is predicted; any valid id."""
    extras: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Extras every microbatch carries."""

    def __post_init__(self) -> None:
        if self.capacity is not None and self.capacity % self.pad_to_multiple:
            down = self.capacity // self.pad_to_multiple * self.pad_to_multiple
            raise ValueError(
                f"row capacity {self.capacity} is not a multiple of {self.pad_to_multiple}: "
                f"sequence parallelism splits rows evenly. Use {down + self.pad_to_multiple}"
                f"{f' or {down}' if down else ''}."
            )

    def row_length(self, used: int) -> int:
        """Positions of a row that must hold `used` tokens (at least one position)."""
        if self.capacity is None:
            return max(-(-used // self.pad_to_multiple), 1) * self.pad_to_multiple
        if used > self.capacity:
            raise ValueError(
                f"a row of {used} tokens does not fit its capacity {self.capacity}: pack with the "
                "same capacity."
            )
        return self.capacity


def fit_samples(
    samples: Sequence[Sample],
    limit: int,
    *,
    overlong: Overlong = "error",
    flag: str = CAPACITY_FLAG,
) -> tuple[list[Sample], Fitted]:
    """Samples kept and cut by the overlong rule (see `fit_lengths`), and what was changed."""
    lengths = [len(sample.tokens) for sample in samples]
    fitted = fit_lengths(lengths, limit, overlong=overlong, flag=flag)
    kept = [s.truncated(n) for s, n in zip(samples, fitted.lengths, strict=True) if n]
    return kept, fitted


def build_microbatches(
    samples: Sequence[Sample],
    *,
    microbatches: Sequence[Sequence[int]],
    loss: LossWeights,
    layout: RowLayout,
) -> list[Microbatch]:
    """A microbatch for every list of sample indices; `loss` comes from the same microbatches."""
    return [
        build_microbatch(
            [samples[i] for i in members],
            weights=[loss.weights[i] for i in members],
            count=count,
            layout=layout,
        )
        for members, count in zip(microbatches, loss.counts, strict=True)
    ]


def build_microbatch(
    samples: Sequence[Sample], *, weights: Sequence[Tensor], count: int, layout: RowLayout
) -> Microbatch:
    """Samples in the given order as one packed row or as padded rows; none = a zero-weight filler.

    weights: w_t of each sample [n], aligned with its tokens.
    """
    _check_members(samples, weights, layout)
    lengths = [len(sample.tokens) for sample in samples]
    columns: dict[str, list[Tensor]] = {
        "tokens": [s.tokens.long() for s in samples],
        "positions": [torch.arange(n) for n in lengths],
        "labels": [_to_label_positions(s.tokens.long(), layout.pad_token) for s in samples],
        "weights": [_to_label_positions(w.float()) for w in weights],
        "padding": [torch.zeros(n, dtype=torch.bool) for n in lengths],
    }
    for name, dtype in layout.extras.items():
        columns[name] = [_to_label_positions(s.extras[name].to(dtype)) for s in samples]
    fills = {"tokens": layout.pad_token, "labels": layout.pad_token, "padding": True}
    dtypes = {"weights": torch.float32, "padding": torch.bool, **layout.extras}
    used = sum(lengths) if layout.packed else max(lengths, default=0)
    width = layout.row_length(used)
    lay_out = _packed_row if layout.packed else _padded_rows
    laid = {
        name: lay_out(
            parts, width=width, fill=fills.get(name, 0), dtype=dtypes.get(name, torch.int64)
        )
        for name, parts in columns.items()
    }
    if layout.packed:
        laid["positions"][0, used:] = torch.arange(width - used)
    return Microbatch(
        tokens_BS=laid["tokens"],
        positions_BS=laid["positions"],
        labels_BS=laid["labels"],
        weights_BS=laid["weights"],
        count=count,
        padding_BS=laid["padding"],
        cu_seqlens=_borders(lengths, width=width, layout=layout) if layout.packed else None,
        extras={name: laid[name] for name in layout.extras},
    )


def filler_microbatch(layout: RowLayout) -> Microbatch:
    """The smallest microbatch that adds nothing: zero weights and count, for ranks without work."""
    return build_microbatch([], weights=[], count=0, layout=layout)


def to_token_values(
    values_BS: Tensor, *, lengths: Sequence[int], packed: bool = True
) -> list[Tensor]:
    """Per-sequence values [n] aligned with tokens from values at label positions [B, S].

    The inverse of the shift into a microbatch (the way back for log-probs); first entries are 0.
    lengths: of the microbatch's sequences, in its order.
    """
    if packed:
        pieces = values_BS[0, : sum(lengths)].split(list(lengths))
    else:
        pieces = [values_BS[b, :n] for b, n in enumerate(lengths)]
    return [torch.cat([piece.new_zeros(1), piece[:-1]]) for piece in pieces]


def turn_ids_from_roles(
    roles: Sequence[str],
    *,
    lengths: Sequence[int] | None = None,
    trained: Sequence[str] = ("assistant",),
) -> Tensor:
    """Turn of each token [n]: messages with a trained role are turns 0, 1, ...; all others -1.

    lengths: tokens of each message; None = one each.  The loss mask is `turn_ids >= 0`.
    """
    sizes = [1] * len(roles) if lengths is None else list(lengths)
    if len(sizes) != len(roles):
        raise ValueError(f"{len(roles)} roles but {len(sizes)} lengths: give one per message.")
    ids, turns = [], 0
    for role in roles:
        ids.append(turns if role in trained else -1)
        turns += role in trained
    return torch.repeat_interleave(torch.tensor(ids, dtype=torch.int64), torch.tensor(sizes).long())


def mask_from_roles(
    roles: Sequence[str],
    *,
    lengths: Sequence[int] | None = None,
    trained: Sequence[str] = ("assistant",),
) -> Tensor:
    """Loss mask [n], bool: only tokens of trained roles, so no system, user or tool token."""
    return turn_ids_from_roles(roles, lengths=lengths, trained=trained) >= 0


def _to_label_positions(values: Tensor, fill: int = 0) -> Tensor:
    """[n] aligned with tokens -> [n] at the positions that predict them; the last gets `fill`."""
    return torch.cat([values[1:], values.new_full((1,), fill)])


def _packed_row(parts: list[Tensor], *, width: int, fill: int, dtype: torch.dtype) -> Tensor:
    """Parts one after the other in one row [1, width]."""
    row = torch.full((1, width), fill, dtype=dtype)
    if parts:
        joined = torch.cat(parts)
        row[0, : len(joined)] = joined
    return row


def _padded_rows(parts: list[Tensor], *, width: int, fill: int, dtype: torch.dtype) -> Tensor:
    """Each part at the start of its own row [B, width]; B is 1 for a filler."""
    rows = torch.full((max(len(parts), 1), width), fill, dtype=dtype)
    for row, part in zip(rows, parts, strict=False):
        row[: len(part)] = part
    return rows


def _borders(lengths: Sequence[int], *, width: int, layout: RowLayout) -> Tensor:
    """cu_seqlens, int32: 0, the ends of the sequences, the row's end (padding comes last)."""
    borders = [0, *accumulate(lengths)]
    if borders[-1] < width:
        borders.append(width)
    if layout.max_segments is not None:
        borders += [width] * (layout.max_segments + 2 - len(borders))
    return torch.tensor(borders, dtype=torch.int32)


def _check_members(samples: Sequence[Sample], weights: Sequence[Tensor], layout: RowLayout) -> None:
    """Refuse weights that do not match, missing extras, and more sequences than a row may have."""
    if layout.packed and layout.max_segments is not None and len(samples) > layout.max_segments:
        raise ValueError(
            f"{len(samples)} sequences in a row of at most {layout.max_segments}: pack with the "
            "same max_segments."
        )
    for i, (sample, weight) in enumerate(zip(samples, weights, strict=True)):
        if weight.shape != sample.tokens.shape:
            raise ValueError(
                f"sequence {i} of the microbatch: weights {list(weight.shape)} for tokens "
                f"{list(sample.tokens.shape)}; compute them after truncation."
            )
        missing = [name for name in layout.extras if name not in sample.extras]
        if missing:
            raise ValueError(f"sequence {i} of the microbatch lacks extras {', '.join(missing)}.")
