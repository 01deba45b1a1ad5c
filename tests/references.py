"""The plain thing that clever code must equal: padded, one process, no microbatches, no chunks.

Everything here is written as its sentence says it: loops over Python lists, whole logits, row x row
masks.  Nothing imports the code it checks; only the data types are shared.

Legend: B rows, S positions, T tokens, V vocabulary with its padding, H query heads, G key heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.logprobs.vocab_parallel import LogProbs
from megatron_ext.packing.batch import Sample

LogitsOf = Callable[[Tensor, Tensor], Tensor]
"""A plain causal model: (tokens [B, S], positions [B, S]) -> logits [B, S, V]."""


# Loss normalisation


def normalized_loss(
    losses: Sequence[Tensor],
    masks: Sequence[Tensor],
    *,
    mode: str,
    turn_ids: Sequence[Tensor] | None = None,
    rows: Sequence[Sequence[int]] | None = None,
    max_length: int = 1,
    denominator: int | None = None,
) -> Tensor:
    """The loss of one global batch from the losses [n] of every sample's tokens.

    rows: which samples share a packed row (row-mean); None = each has its own.
    denominator: a fixed number instead of what the mode counts; token-sum needs one.
    A sample's first token has no prediction and never counts.
    """
    kept = [loss[1:][mask[1:] != 0] for loss, mask in zip(losses, masks, strict=True)]
    match mode:
        case "token-sum":
            values = [sample.sum() for sample in kept]
        case "global-token-mean":
            values = _means([_joined(kept)])
        case "row-mean":
            rows = [[i] for i in range(len(kept))] if rows is None else rows
            values = _means([_joined([kept[i] for i in row]) for row in rows])
        case "sample-mean":
            values = _means(kept)
        case "turn-mean":
            assert turn_ids is not None
            values = _means(_turns(kept, masks, turn_ids))
        case "constant":
            values = [sample.sum() / max_length for sample in kept if len(sample)]
        case _:
            raise ValueError(f"unknown mode {mode}")
    assert mode != "token-sum" or denominator is not None
    total = sum(values, start=0 * _joined(kept).sum())
    return total / (max(len(values), 1) if denominator is None else denominator)


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0), *pieces])


def _means(groups: Iterable[Tensor]) -> list[Tensor]:
    return [group.mean() for group in groups if len(group)]


def _turns(
    kept: Sequence[Tensor], masks: Sequence[Tensor], turn_ids: Sequence[Tensor]
) -> Iterator[Tensor]:
    """The kept losses of every turn of every sample."""
    for losses, mask, ids in zip(kept, masks, turn_ids, strict=True):
        kept_ids = ids[1:][mask[1:] != 0]
        yield from (losses[kept_ids == turn] for turn in kept_ids.unique())


def local_mean_loss(
    losses: Sequence[Tensor], masks: Sequence[Tensor], *, microbatches: Sequence[Sequence[int]]
) -> Tensor:
    """The common mistake: the mean over microbatches of each one's own token mean."""
    means = [
        normalized_loss(
            [losses[i] for i in members], [masks[i] for i in members], mode="global-token-mean"
        )
        for members in microbatches
    ]
    return torch.stack(means).mean()


def padded_token_losses(
    logits_of: LogitsOf, samples: Sequence[Sample], *, vocab_size: int
) -> list[Tensor]:
    """Cross-entropy [n] of every sample's tokens given their prefix, all samples in one batch.

    Full log-softmax over the real vocabulary; a sample's first value is 0.
    """
    width = max(len(s.tokens) for s in samples)
    tokens_BS = torch.stack([F.pad(s.tokens, (0, width - len(s.tokens))) for s in samples])
    positions_BS = torch.arange(width).expand_as(tokens_BS)
    logits_BSV = logits_of(tokens_BS, positions_BS)[..., :vocab_size]
    logprobs_BSV = logits_BSV.to(torch.promote_types(logits_BSV.dtype, torch.float32)).log_softmax(
        -1
    )
    found = []
    for row_SV, sample in zip(logprobs_BSV, samples, strict=True):
        following = sample.tokens[1:, None]
        chosen = row_SV[: len(following)].gather(1, following).squeeze(1)
        found.append(torch.cat([chosen.new_zeros(1), -chosen]))
    return found


# Packing


def first_fit_decreasing(
    lengths: Sequence[int], capacity: int, *, max_segments: int | None = None
) -> list[list[int]]:
    """Longest first, each into the first row with room: looks at every row."""
    rows: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for row in rows:
            has_room = sum(lengths[j] for j in row) + lengths[i] <= capacity
            if has_room and len(row) != max_segments:
                row.append(i)
                break
        else:
            rows.append([i])
    return rows


def padded_budget(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Seed 000's loop: microbatches whose padded size (count * longest) is at most max_tokens."""
    batches, current = [], []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if current and (len(current) + 1) * lengths[current[0]] > max_tokens:
            batches.append(current)
            current = []
        current.append(i)
    return batches + ([current] if current else [])


def masked_softmax_attention(
    q_THD: Tensor, k_TGD: Tensor, v_TGV: Tensor, *, lengths: Sequence[int], scale: float
) -> Tensor:
    """Causal attention inside each segment by one T x T mask, softmax written out."""
    repeats = q_THD.shape[1] // k_TGD.shape[1]
    k_THD, v_THV = (x.repeat_interleave(repeats, dim=1) for x in (k_TGD, v_TGV))
    segments_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    allowed_TT = (segments_T[:, None] == segments_T[None]).tril()
    scores_HTT = torch.einsum("qhd,khd->hqk", q_THD, k_THD) * scale
    weights_HTT = scores_HTT.masked_fill(~allowed_TT, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khv->qhv", weights_HTT, v_THV)


# Log-probabilities


def full_logits_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    vocab_size: int,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
) -> LogProbs:
    """Log-probabilities and entropy from all logits at once; V is the whole vocabulary."""
    logits_TV = F.linear(hidden_TD, weight_VD, bias_V)[:, :vocab_size]
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32)) / temperature
    log_softmax_TV = logits_TV.log_softmax(dim=1)
    entropy_T = -(log_softmax_TV.exp() * log_softmax_TV).sum(dim=1)
    return LogProbs(log_softmax_TV.gather(1, labels_T[:, None]).squeeze(1), entropy_T)
