"""Does packing leak?  Packed log-probabilities against each sequence alone, in nats.

Idea: run the packed rows right, and wrong in the two ways that systems get wrong: without the block
mask and with positions that run on through the row.  The right rows must agree with the sequences
alone to rounding; the wrong ones show what a leak costs a trained model (an untrained one hardly
looks at its context).
Not covered: gradients, which follow from the log-probabilities being the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_ext.packing.batch import RowLayout, Sample, build_microbatch, to_token_values
from megatron_ext.packing.pack import pack
from megatron_ext.packing.types import Microbatch

LogprobsOf = Callable[[Microbatch], Tensor]
"""A model: the log-probabilities [B, S] of a microbatch's labels where its weights are not 0."""

RIGHT = "block mask, restarted positions"
WRONG = ("causal mask, running positions", "causal mask, restarted positions")


def packing_errors(
    logprobs_of: LogprobsOf, samples: Sequence[Sample], *, capacity: int, pad_to_multiple: int = 1
) -> dict[str, float]:
    """Largest |packed - alone| over trained tokens, in nats, of WRONG and RIGHT rows.

    Rows of `capacity` tokens; a model with learned positions must have as many.  A model with
    rotary positions takes them from the borders: its two wrong ways are the same.
    """
    layout = RowLayout(pad_to_multiple=pad_to_multiple)
    alone = [_logprobs(logprobs_of, [sample], layout, way=RIGHT)[0] for sample in samples]
    errors: dict[str, float] = {way: 0.0 for way in (*WRONG, RIGHT)}
    for members in pack([len(sample.tokens) for sample in samples], capacity):
        row = [samples[i] for i in members]
        for way in errors:
            together = _logprobs(logprobs_of, row, layout, way=way)
            for i, values in zip(members, together, strict=True):
                difference = (values - alone[i]).abs()[samples[i].mask]
                errors[way] = max([errors[way], *difference.tolist()])
    return errors


def _logprobs(
    logprobs_of: LogprobsOf, samples: Sequence[Sample], layout: RowLayout, *, way: str
) -> list[Tensor]:
    """Log-probabilities [n] of each sample's trained tokens in one row, 0 elsewhere."""
    weights = [sample.mask.float() for sample in samples]
    microbatch = build_microbatch(samples, weights=weights, count=0, layout=layout)
    length = microbatch.tokens_BS.shape[1]
    if way != RIGHT:
        one_segment = torch.tensor([0, length], dtype=torch.int32)
        microbatch = replace(microbatch, cu_seqlens=one_segment)
    if way == "causal mask, running positions":
        microbatch = replace(microbatch, positions_BS=torch.arange(length)[None])
    found_BS = torch.where(microbatch.weights_BS != 0, logprobs_of(microbatch), 0.0)
    return to_token_values(found_BS, lengths=[len(sample.tokens) for sample in samples])
