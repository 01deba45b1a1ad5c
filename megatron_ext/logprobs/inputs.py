"""What `chunked.selected_logprobs` refuses, with everything that is wrong in one message.

Legend: T tokens, D model, V the vocabulary columns of this rank.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_inputs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    bias_V: Tensor | None,
    needed_T: Tensor | None,
    chunk_size: int,
) -> None:
    """Raise one `ValueError` that names every shape, type or size that does not fit."""
    tokens, columns = hidden_TD.shape[:1], weight_VD.shape[:1]
    wrong = []
    if hidden_TD.ndim != 2 or weight_VD.ndim != 2 or hidden_TD.shape[1] != weight_VD.shape[1]:
        wrong.append(
            f"hidden {list(hidden_TD.shape)} and weight {list(weight_VD.shape)} must be [T, D] and "
            "[V, D]: flatten the sequence and batch dimensions"
        )
    if hidden_TD.dtype != weight_VD.dtype or not hidden_TD.is_floating_point():
        wrong.append(
            f"hidden is {hidden_TD.dtype} and weight {weight_VD.dtype}: cast both to one "
            "floating-point type"
        )
    if labels_T.shape != tokens or labels_T.is_floating_point():
        wrong.append(f"labels are {_describe(labels_T)}, must be integers {list(tokens)}")
    if bias_V is not None and (bias_V.shape, bias_V.dtype) != (columns, weight_VD.dtype):
        wrong.append(f"bias is {_describe(bias_V)}, must be {weight_VD.dtype} {list(columns)}")
    if needed_T is not None and (needed_T.shape, needed_T.dtype) != (tokens, torch.bool):
        wrong.append(f"needed is {_describe(needed_T)}, must be torch.bool {list(tokens)}")
    if chunk_size < 0:
        wrong.append(f"chunk_size {chunk_size} must be a number of tokens, or 0 for all at once")
    if wrong:
        raise ValueError("selected_logprobs: " + "; ".join(wrong) + ".")


def check_labels(labels_T: Tensor, *, vocab_size: int) -> None:
    """Raise `ValueError` if a label is not a token.  Waits for the GPU once."""
    is_outside_T = (labels_T < 0) | (labels_T >= vocab_size)
    if is_outside_T.any():
        position = int(is_outside_T.nonzero()[0])
        raise ValueError(
            f"{int(is_outside_T.sum())} of {len(labels_T)} labels are not in [0, vocab_size = "
            f"{vocab_size}); the first is {int(labels_T[position])}, at needed position "
            f"{position}. Leave positions without a token out, e.g. needed_T=labels_T != -100."
        )


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
