"""What can be chosen about packing and loss normalisation; every field becomes a flag.

No `from __future__ import annotations` here: Megatron's flag factory reads annotations as types.
"""

from dataclasses import dataclass
from typing import Literal

from megatron_ext.options.ranges import Ranged, ranged

LossNormalization = Literal[
    "token-sum", "global-token-mean", "row-mean", "sample-mean", "turn-mean", "constant"
]
LossDenominator = Literal["counted", "global-batch-size", "one"]
Overlong = Literal["error", "truncate", "drop"]

FIXED_DENOMINATOR_MODES = ("token-sum", "sample-mean", "constant")
"""Modes in which a fixed N makes sense: the other three define N by what they count."""


@dataclass(frozen=True, kw_only=True)
class PackingConfig(Ranged):
    """Options of the packing room; defaults leave Megatron's padded, fixed-size microbatches."""

    packing: bool = False
    """Lay several sequences in one row per microbatch with block-diagonal attention.
    Off: one sequence a row, padded."""

    max_tokens_per_microbatch: int = ranged(0, at_least=0, note="0 = off")
    """Positions one microbatch may compute, padding included; with --packing the capacity of its
    row. 0 = --seq-length with --packing, a fixed --micro-batch-size without."""

    max_sequences_per_row: int = ranged(0, at_least=0, note="0 = no limit")
    """Most sequences in a packed row; 0 = no limit."""

    pad_rows_to_capacity: bool = False
    """Pad every packed row to its full capacity (static shapes).
    Off: only to what sequence parallelism needs."""

    overlong: Overlong = "error"
    """What happens to a sequence longer than a row: stop with an error, keep its first tokens, or
    leave it out. Both of the latter are counted in the metrics."""

    balance_attention_weight: float = ranged(0.0, at_least=0, note="0 = off")
    """Cost of one attended token pair (n^2 per sequence) when data-parallel ranks are balanced, in
    units of one token's other work; about 1 / (12 * hidden size). 0 = balance tokens only."""

    loss_normalization: LossNormalization = "global-token-mean"
    """What weighs the same in the loss of a step: every token of the data set (token-sum), of the
    global batch (global-token-mean), every packed row, true sample or assistant turn, or every
    token over a constant length (constant, Dr. GRPO)."""

    loss_denominator: LossDenominator = "counted"
    """What the loss of a step is divided by: what the mode counts (token-sum counts nothing and
    takes --global-batch-size), the fixed --global-batch-size, or one (a plain sum)."""

    loss_normalization_max_length: int = ranged(0, at_least=0, note="0 = not set")
    """Length in tokens by which --loss-normalization constant divides; 0 = not set."""

    def row_capacity(self, *, seq_length: int) -> int:
        """Tokens that a packed row holds."""
        return self.max_tokens_per_microbatch or seq_length

    def fixed_denominator(self, *, global_batch_size: int) -> int | None:
        """The fixed N of a step (to be counted once over all ranks), or None where N is counted."""
        if self.loss_denominator == "one":
            return 1
        fixed = self.loss_denominator == "global-batch-size"
        return global_batch_size if fixed or self.loss_normalization == "token-sum" else None

    def problems(self, *, seq_length: int, sequence_multiple: int = 1) -> list[str]:
        """Every mismatch as one sentence with its remedy; empty when the options fit together.

        sequence_multiple: what a row's length must be a multiple of (the tensor-parallel size under
        sequence parallelism, else 1).
        """
        found = []
        if self.loss_normalization == "constant" and self.loss_normalization_max_length == 0:
            found.append(
                "--loss-normalization constant divides by a fixed length: "
                "give it as --loss-normalization-max-length (usually the longest allowed response)."
            )
        if self.loss_denominator != "counted" and (
            self.loss_normalization not in FIXED_DENOMINATOR_MODES
        ):
            found.append(
                f"--loss-denominator {self.loss_denominator} does not fit --loss-normalization "
                f"{self.loss_normalization}, which divides by what it counts. Use counted, or one "
                f"of {', '.join(FIXED_DENOMINATOR_MODES)}."
            )
        if not self.packing:
            found += [
                f"--{name} needs --packing."
                for name, value in (
                    ("max-sequences-per-row", self.max_sequences_per_row),
                    ("pad-rows-to-capacity", self.pad_rows_to_capacity),
                )
                if value
            ]
        capacity = self.row_capacity(seq_length=seq_length)
        if self.packing and self.pad_rows_to_capacity and capacity % sequence_multiple:
            down = capacity // sequence_multiple * sequence_multiple
            found.append(
                f"--pad-rows-to-capacity makes rows of {capacity} tokens, not a multiple of "
                f"{sequence_multiple} as sequence parallelism needs. Use "
                f"--max-tokens-per-microbatch {down or sequence_multiple} "
                f"or {down + sequence_multiple}."
            )
        return found
