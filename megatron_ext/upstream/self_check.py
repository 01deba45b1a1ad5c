"""Is a set-up right?  One line a question, each with its number and what to do when it fails.

A line is a function of a `Setup` in LINES; a new one is written beside them and added there.  Every
rank runs every line and gets the same outcome.
Invariant the tests check: a sound checkpoint passes on every layout, a changed one fails.
Not covered: speed, and whether the data is what it should be.

Legend: B rows, S positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from megatron_ext.evaluation.transformers_model import transformers_logprobs
from megatron_ext.mla.written_out import written_out_logprobs
from megatron_ext.packing.leak import RIGHT, WRONG, packing_errors
from megatron_ext.upstream.checkpoint_tensors import load_weights, on_writer, save_weights
from megatron_ext.upstream.evaluate import logprobs_of
from megatron_ext.upstream.microbatches import replica_of
from megatron_ext.upstream.self_check_rl import ratios_are_one, sampler_is_trainer
from megatron_ext.upstream.self_check_setup import (
    Line,
    Setup,
    dense_logprobs,
    judged,
    packed_row,
    plan_of,
    ragged_samples,
    random_tokens,
    skipped,
)
from megatron_ext.upstream.self_check_update import update_is_single_process

_LOUD = 1e3
"""How far the padding's output weights are turned up to see whether they are heard."""


Check = Callable[[Setup], Line]


def run_checks(setup: Setup, *, leave_out: Collection[Check] = ()) -> Iterator[Line]:
    """Every line, as soon as it is known; the same on every rank.  Collective."""
    for check in LINES:
        if check not in leave_out:
            yield check(setup)


def against_transformers(setup: Setup) -> Line:
    """Log-probabilities on this layout against transformers' on one process.

    Of converted attention, which transformers does not know: against its definition, absorbed.
    """
    reference, logprobs = setup.reference, transformers_logprobs
    name = "log-probs equal transformers'"
    if setup.options.latent.latent_layout != "none":
        name, logprobs = "log-probs equal absorbed decoding's", written_out_logprobs
    if reference is None:
        return skipped(name, reason="there is nothing to compare with: give --reference DIR")
    tokens_BS = random_tokens(setup)
    try:
        expected = on_writer(setup.layout, lambda: logprobs(reference, tokens_BS))
    except ValueError as error:
        return judged(name, passed=False, number="-", advice=str(error))
    errors = (dense_logprobs(setup, tokens_BS) - expected).abs()
    # Rounding to bf16 sends some tokens to other experts: the middle one tells.
    kind, error = ("median", errors.median()) if setup.is_half else ("max", errors.max())
    return judged(
        name,
        passed=bool(error <= setup.tolerance),
        number=f"{kind} {error:.1e} nats",
        advice="compare config.json with the one the weights came with (rope_theta, rope scaling, "
        "norm epsilon, tied embeddings), then try one rank: right there means the layout is wrong",
    )


def replicas_agree(setup: Setup) -> Line:
    """All ranks, given the same tokens, get the same values from their copies of the weights."""
    name, num_ranks = "all replicas agree", torch.distributed.get_world_size()
    if num_ranks == 1:
        return skipped(name, reason="there is one rank, so nothing to compare")
    mine = dense_logprobs(setup, random_tokens(setup))
    everywhere: list = [None] * num_ranks
    torch.distributed.all_gather_object(everywhere, mine)
    error = max(float((other - everywhere[0]).abs().max()) for other in everywhere)
    return judged(
        name,
        passed=error <= (setup.tolerance if setup.is_half else 1e-6),
        number=f"max {error:.1e} nats, {num_ranks} ranks",
        advice="ranks hold different weights: load the same checkpoint files on every node",
    )


def padding_is_masked(setup: Setup) -> Line:
    """Rows of the vocabulary's padding are loud for a moment: no log-probability may notice."""
    args, name = setup.options.megatron, "padded vocabulary is masked"
    if args.padded_vocab_size == args.vocab_size:
        return skipped(name, reason="the vocabulary has no padding on this layout")
    tokens_BS = random_tokens(setup)
    before = dense_logprobs(setup, tokens_BS)
    error = 0.0
    for sign in (1.0, -1.0):
        with _LoudPadding(setup, factor=sign * _LOUD):
            error = max(error, float((dense_logprobs(setup, tokens_BS) - before).abs().max()))
    return judged(
        name,
        passed=error == 0.0,
        number=f"{args.padded_vocab_size - args.vocab_size} rows, max {error:.1e} nats",
        advice="--vocab-size must be the checkpoint's own, without padding",
    )


def checkpoint_round_trip(setup: Setup) -> Line:
    """Weights written and read again are the same bits."""
    name, advice = "checkpoint round trip", "--scratch-dir must be one disk that all ranks see"
    chunks = setup.stepper.model.bare_chunks
    tensors = [t for chunk in chunks for t in chunk.state_dict().values() if torch.is_tensor(t)]
    kept = [tensor.detach().cpu().clone() for tensor in tensors]
    try:
        save_weights(chunks, setup.layout, folder=setup.scratch / "weights")
        for tensor in tensors:
            tensor.detach().zero_()
        load_weights(chunks, setup.layout, folder=setup.scratch / "weights")
    except (OSError, ValueError) as error:
        return judged(name, passed=False, number="-", advice=f"{error}; {advice}")
    finally:
        pairs = list(zip(tensors, kept, strict=True))
        differ = sum(not torch.equal(tensor.cpu(), before) for tensor, before in pairs)
        for tensor, before in pairs:
            tensor.detach().copy_(before)
    counts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(counts, (differ, len(kept)))
    differ, total = (sum(numbers) for numbers in zip(*counts, strict=True))
    return judged(
        name,
        passed=differ == 0,
        number=f"{differ} of {total} tensors of all ranks differ",
        advice=advice,
    )


def packing_is_exact(setup: Setup) -> Line:
    """Packed sequences have the values they have alone."""
    error = _packing_errors(setup)[RIGHT]
    return judged(
        "packed = alone",
        passed=error <= setup.tolerance,
        number=f"max {error:.1e} nats",
        advice="the attention lets sequences of a row see each other: use the local layer spec, or "
        "an attention that takes cu_seqlens",
    )


def leaks_are_seen(setup: Setup) -> Line:
    """Rows without the block mask differ clearly: the line above would notice a leak."""
    errors = _packing_errors(setup)
    smallest, limit = min(errors[way] for way in WRONG), 10 * errors[RIGHT]
    return judged(
        "a leak would be seen",
        passed=smallest > limit,
        number=f"{smallest:.1e} nats, right rows {errors[RIGHT]:.1e}",
        advice="this model hardly looks at its context, so that 'packed = alone' says nothing: "
        "check a trained one",
    )


def normalisation_counts(setup: Setup) -> Line:
    """Tokens Megatron divides by are those of the masks, and the loss is the sum over them."""
    plan = plan_of(setup, ragged_samples(setup) * setup.layout.dp_size)
    sums = torch.zeros(2, dtype=torch.float64)
    for sample in ragged_samples(setup):
        values = logprobs_of(setup.stepper, packed_row(setup, [sample]))
        sums += torch.tensor([-float(values.double().sum()), int(sample.mask.sum())])
    expected, count = float(sums[0] / sums[1]), int(sums[1]) * setup.layout.dp_size
    try:
        result = setup.stepper.forward_backward(plan.microbatches)
    except AssertionError as error:
        return judged("loss / N", passed=False, number="-", advice=str(error))
    difference = abs(result.loss - expected)
    return judged(
        "loss / N",
        passed=result.count == count and difference <= setup.tolerance,
        number=f"N {result.count} of {count}, loss off by {difference:.1e}",
        advice="gradients are divided by another number than the trained tokens: keep "
        "--calculate-per-token-loss",
    )


LINES: tuple[Check, ...] = (
    against_transformers,
    replicas_agree,
    padding_is_masked,
    checkpoint_round_trip,
    packing_is_exact,
    leaks_are_seen,
    normalisation_counts,
    sampler_is_trainer,
    ratios_are_one,
    update_is_single_process,
)
"""What `run_checks` asks, in order; the last changes the optimizer's state."""


class _LoudPadding:
    """The padding's rows of this rank's output layer are factor x its first row, then as before."""

    def __init__(self, setup: Setup, *, factor: float) -> None:
        self.setup = setup
        self.factor = factor
        self.rows: Tensor | None = None
        self.kept: Tensor | None = None

    def __enter__(self) -> None:
        layout, model = self.setup.layout, self.setup.stepper.model.bare_chunks[-1]
        if not layout.is_last_stage:
            return
        weight: Any = model.output_layer.weight
        if model.share_embeddings_and_output_weights:
            weight = model.shared_embedding_or_output_weight()
        first_padded = self.setup.options.megatron.vocab_size
        first_padded -= layout.groups.tp.rank() * len(weight)
        rows: Tensor = weight.detach()[max(first_padded, 0) :]
        self.rows, self.kept = rows, rows.clone()
        rows.copy_((weight.detach()[0].sign() * self.factor).expand_as(rows))

    def __exit__(self, *_: object) -> None:
        if self.rows is not None and self.kept is not None:
            self.rows.copy_(self.kept)


def _packing_errors(setup: Setup) -> dict[str, float]:
    multiple = replica_of(setup.layout, setup.options).sequence_multiple
    errors = packing_errors(
        lambda microbatch: logprobs_of(setup.stepper, microbatch),
        ragged_samples(setup),
        capacity=setup.length,
        pad_to_multiple=multiple,
    )
    assert not any(math.isnan(error) for error in errors.values()), "a log-probability is nan"
    return errors
