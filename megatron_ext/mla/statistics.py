"""What calibration keeps of a text: sums over its tokens, layer by layer, that can be added.

Sums of parts of a text, and of data-parallel ranks, are added; tensor-parallel ranks, which have
some heads each, join theirs.  The text itself is not kept, but for a few sequences of a layer's
inputs where refits want them.
Invariants the tests check: the sum over parts equals the whole, heads joined equal all heads at
once, and a file gives back what was saved.

Legend: as in `layers`, and T tokens, P pairs, F features (`logit_residual`), S kept sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from megatron_ext.mla.forward import Heads, head_logits, heads
from megatron_ext.mla.layers import AttentionLayer
from megatron_ext.mla.logit_residual import contribution_grams

BY_HEAD = {"query_norms_HP", "key_norms_GP", "gram_HPFF", "attention_H2", "metric_HWW"}
SHARED_SUMS = {"received", "received_moment_DD"}
"""Sums over heads: tensor-parallel ranks add them."""


@dataclass(frozen=True, kw_only=True)
class LayerStatistics:
    """Sums over calibration tokens of one layer, float64; x is the normalised input."""

    tokens: Tensor
    """Number of tokens, int64."""
    sum_D: Tensor
    """Of x."""
    moment_DD: Tensor
    """Of x x^T, not centred."""
    received: Tensor
    """Of n_j, the squared attention that token j gets from all heads and queries."""
    received_moment_DD: Tensor
    """Of n_j x_j x_j^T."""
    query_norms_HP: Tensor
    """Of the lengths of query pairs."""
    key_norms_GP: Tensor
    gram_HPFF: Tensor
    """Of `contribution_grams`."""
    attention_H2: Tensor
    """[H, 2]: of squared attention weights; of sum_j a_ij^2 |W_o (v_j - o_i)|^2 = beta_i."""
    metric_HWW: Tensor
    """Of beta_i q_i q_i^T with queries before RoPE."""
    inputs_STD: Tensor
    """Inputs of the kept sequences, all equally long; none with S = 0."""

    def __add__(self, other: Self) -> Self:
        """Of two parts of a text, or of two data-parallel ranks."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in _sums(self)}
        kept = [p for p in (self.inputs_STD, other.inputs_STD) if len(p)]
        inputs_STD = torch.cat(kept) if kept else self.inputs_STD
        return type(self)(**sums, inputs_STD=inputs_STD)

    def join(self, other: Self) -> Self:
        """Of the heads of two tensor-parallel ranks, in their order, that saw the same tokens."""
        values = dict(vars(self))
        for name in BY_HEAD:
            values[name] = torch.cat((values[name], getattr(other, name)))
        for name in SHARED_SUMS:
            values[name] = values[name] + getattr(other, name)
        return type(self)(**values)

    def moment(self, *, token_weight: float = 0.0) -> Tensor:
        """Mean of w x x^T [D, D], w = (1 - t) + t n_j / mean(n), for t = token_weight.

        t > 0 counts a token by how much queries read it: few tokens get most of the attention, and
        an error there reaches every output.

        Raises:
            ValueError: nothing was calibrated.
        """
        if self.tokens == 0:
            raise ValueError("statistics of no tokens: calibrate on a text that is not empty.")
        plain_DD = self.moment_DD / self.tokens
        if token_weight == 0:
            return plain_DD
        read_DD = self.received_moment_DD / self.received
        return (1 - token_weight) * plain_DD + token_weight * read_DD

    def with_moment_of(self, other: Self) -> Self:
        """With the mean second moment of other inputs."""
        moment_DD = other.moment_DD * (self.tokens / other.tokens)
        return replace(self, moment_DD=moment_DD)

    @property
    def mean_D(self) -> Tensor:
        """Mean of x."""
        return self.sum_D / self.tokens


def _sums(statistics: LayerStatistics) -> list:
    return [f for f in fields(statistics) if f.name != "inputs_STD"]


def sequence_statistics(
    layer: AttentionLayer, x_TD: Tensor, *, num_queries: int = 0, keep: bool = False
) -> LayerStatistics:
    """Sums of one sequence, computed in the type of `x_TD`.

    layer: of all heads, or of some (tensor parallelism).
    x_TD: the whole sequence, from position 0, at the context length that is calibrated for.
    num_queries: evenly spaced queries from which the sums of `contribution_grams`, by far the most
        work, are extrapolated; 0 = all.
    keep: whether to keep the input for refits.
    """
    found, pairs = heads(layer, x_TD), layer.pairs
    query_HTP, key_GTP = pairs.as_complex(found.query_HTW), pairs.as_complex(found.key_GTW)
    rows_I = sampled_queries(len(x_TD), num_queries)
    received_T = x_TD.new_zeros(len(x_TD))
    grams, attention, metrics = [], [], []
    for head, logits_TT in enumerate(head_logits(layer, found)):
        group = head // layer.heads_per_group
        probabilities_TT = logits_TT.softmax(-1)
        squared_TT = probabilities_TT.square()
        received_T += squared_TT.sum(0)
        beta_T = _output_change(layer, found, head=head, probabilities_TT=probabilities_TT)
        query_TW = found.query_HTW[head]
        metrics.append((query_TW * beta_T[:, None]).T @ query_TW)
        attention.append(torch.stack((squared_TT.sum(), beta_T.sum())))
        grams.append(
            contribution_grams(
                probabilities_TT[rows_I],
                query_IP=query_HTP[head, rows_I] * layer.softmax_scale,
                positions_I=rows_I,
                key_TP=key_GTP[group],
                frequencies_P=pairs.frequencies_P,
            )
        )
    return LayerStatistics(
        tokens=torch.tensor(len(x_TD)),
        sum_D=x_TD.sum(0).double(),
        moment_DD=(x_TD.T @ x_TD).double(),
        received=received_T.sum().double(),
        received_moment_DD=((x_TD * received_T[:, None]).T @ x_TD).double(),
        query_norms_HP=query_HTP.abs().sum(1).double(),
        key_norms_GP=key_GTP.abs().sum(1).double(),
        gram_HPFF=torch.stack(grams).double() * (len(x_TD) / len(rows_I)),
        attention_H2=torch.stack(attention).double(),
        metric_HWW=torch.stack(metrics).double(),
        inputs_STD=x_TD[None] if keep else x_TD.new_empty((0, *x_TD.shape)),
    )


def input_statistics(x_TD: Tensor) -> LayerStatistics:
    """Sums of one sequence's inputs alone; all that heads make of them is empty."""
    nothing, empty = torch.zeros((), dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
    return LayerStatistics(
        tokens=torch.tensor(len(x_TD)),
        sum_D=x_TD.sum(0).double(),
        moment_DD=(x_TD.T @ x_TD).double(),
        received=nothing,
        received_moment_DD=empty,
        query_norms_HP=empty,
        key_norms_GP=empty,
        gram_HPFF=empty,
        attention_H2=empty,
        metric_HWW=empty,
        inputs_STD=x_TD.new_empty((0, *x_TD.shape)),
    )


def sampled_queries(num_tokens: int, count: int) -> Tensor:
    """Positions of `count` queries, evenly spaced and the last one among them; 0 = all."""
    if not 0 < count < num_tokens:
        return torch.arange(num_tokens)
    return num_tokens - 1 - torch.arange(count) * num_tokens // count


def _output_change(
    layer: AttentionLayer, found: Heads, *, head: int, probabilities_TT: Tensor
) -> Tensor:
    """beta [T]: squared change of a query's output for unit errors of its logits.

    d out_i = sum_j a_ij W_o (v_j - o_i) d logit_ij, errors of different keys independent.
    """
    value_TV = found.value_GTV[head // layer.heads_per_group]
    mean_TV = probabilities_TT @ value_TV
    output_DV = layer.output_DHV[:, head]
    gram_VV = output_DV.T @ output_DV
    squared_TT = probabilities_TT.square()
    of_values_T = ((value_TV @ gram_VV) * value_TV).sum(-1)
    of_mean_T = ((mean_TV @ gram_VV) * mean_TV).sum(-1)
    crossed_T = ((squared_TT @ value_TV @ gram_VV) * mean_TV).sum(-1)
    change_T = squared_TT @ of_values_T - 2 * crossed_T + squared_TT.sum(-1) * of_mean_T
    return change_T.clamp(min=0)
