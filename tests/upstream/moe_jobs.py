"""What a rank does in the mixture-of-experts tests: router gradients of the auxiliary losses alone.

The reference runs every sequence alone through the bare model, takes the routers' inputs from it
and writes the auxiliary loss out in plain torch (Fedus et al. 2021, eq. 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_ext.packing.batch import RowLayout, Sample, build_microbatch, filler_microbatch
from megatron_ext.packing.types import Microbatch
from megatron_ext.upstream.checkpoint import load_weights, save_weights
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.model import TrainableModel
from megatron_ext.upstream.step import Stepper
from tests.upstream.jobs import MOE, VOCAB_SIZE, build

AUXILIARY = [*MOE, "--moe-aux-loss-coeff", "1", "--seq-length", "40"]
LENGTHS = [30, 3, 3, 3]
NUM_EXPERTS, TOPK = 4, 2
FLAGS = {
    "aux_loss": "--moe-router-load-balancing-type aux_loss",
    "seq_aux_loss": "--moe-router-load-balancing-type seq_aux_loss",
    "global_aux_loss": "--moe-router-load-balancing-type global_aux_loss",
    "z": "--moe-z-loss-coeff 1 --moe-aux-loss-coeff 0",
}
"""Flags of each auxiliary loss."""


def sequences(lengths: Sequence[int], *, num_trained: int | None = None) -> list[Sample]:
    """Random sequences; the first `num_trained` predicted tokens are trained, None = all."""
    generator = torch.Generator().manual_seed(3)
    found = [
        Sample(
            tokens=torch.randint(VOCAB_SIZE, (n,), generator=generator),
            mask=torch.arange(n) > 0,
        )
        for n in lengths
    ]
    if num_trained is None:
        return found
    few = []
    for sample in found:
        few.append(replace(sample, mask=sample.mask & (sample.mask.cumsum(0) <= num_trained)))
        num_trained -= int(few[-1].mask.sum())
    return few


def rows(samples: Sequence[Sample], layout: RowLayout) -> Microbatch:
    """One microbatch of all samples; every trained token has weight 1."""
    weights = [s.mask.float() for s in samples]
    count = int(sum(w.sum() for w in weights))
    return build_microbatch(samples, weights=weights, count=count, layout=layout)


def routers(model: TrainableModel) -> list[TopKRouter]:
    """The routers of this rank's layers."""
    return [m for chunk in model.chunks for m in chunk.modules() if isinstance(m, TopKRouter)]


def router_gradients(stepper: Stepper, microbatches: list[Microbatch]) -> Tensor:
    """Gradients [layers, E, D] of a step whose main loss is 0."""
    stepper.forward_backward(microbatches, lambda logprobs_BS, _: logprobs_BS * 0)
    return torch.stack([r.weight.main_grad.clone() for r in routers(stepper.model)])


def written_out(stepper: Stepper, samples: Sequence[Sample], kind: str) -> Tensor:
    """The same gradients, from each sequence alone and the formula."""
    found = routers(stepper.model)
    inputs: list[list[Tensor]] = [[] for _ in found]
    hooks = [
        r.register_forward_pre_hook(lambda _, args, into=into: into.append(args[0].flatten(0, 1)))
        for r, into in zip(found, inputs, strict=True)
    ]
    [bare] = stepper.model.bare_chunks
    bare.eval()  # Megatron then leaves its auxiliary losses out
    for sample in samples:
        tokens = sample.tokens[None]
        bare(tokens, torch.arange(tokens.shape[1])[None], None)
    bare.train()
    for hook in hooks:
        hook.remove()
    loss = sum(formula(router.weight, x, kind) for router, x in zip(found, inputs, strict=True))
    return torch.stack(torch.autograd.grad(loss, [r.weight for r in found]))


def formula(weight: Tensor, inputs: Sequence[Tensor], kind: str) -> Tensor:
    """The loss of one layer: over all tokens, or the sequences' mean weighted by their tokens."""
    logits = [x @ weight.T for x in inputs]
    total = sum(len(x) for x in logits)
    if kind == "z":
        return torch.logsumexp(torch.cat(logits), dim=-1).square().mean()
    groups = logits if kind == "seq_aux_loss" else [torch.cat(logits)]
    return sum(_balance(x) * len(x) / total for x in groups)  # type: ignore[return-value]


def _balance(logits: Tensor) -> Tensor:
    scores = logits.softmax(dim=-1)
    chosen = torch.zeros_like(scores).scatter(1, scores.topk(TOPK, dim=1).indices, 1.0)
    return NUM_EXPERTS * (chosen.mean(dim=0) / TOPK * scores.mean(dim=0)).sum()


def write_reference(folder: Path) -> None:
    """Weights that every layout starts from, and the formulas' gradients with them."""
    with device_mode():
        _, layout, model, stepper = build(AUXILIARY)
        save_weights(model.bare_chunks, layout, folder=folder / "weights")
        samples = sequences(LENGTHS)
        torch.save({kind: written_out(stepper, samples, kind) for kind in FLAGS}, folder / "right")


def compare(folder: Path, *, flags: str, kind: str) -> dict[str, float]:
    """Of each way to lay sequences out: largest difference over the reference's largest entry.

    A rank of a pipeline stage compares its own layers.
    """
    with device_mode():
        _, layout, model, stepper = build([*AUXILIARY, *FLAGS[kind].split(), *flags.split()])
        load_weights(model.bare_chunks, layout, folder=folder / "weights")
        right = torch.load(folder / "right")[kind]
        stage, size = layout.groups.pp.rank(), len(right) // layout.pp_size
        mine = right[stage * size :][:size]
        found = {}
        for name, microbatches in ways(kind, multiple=layout.tp_size).items():
            difference = router_gradients(stepper, microbatches) - mine
            found[name] = float(difference.abs().max() / mine.abs().max())
        return found


def ways(kind: str, *, multiple: int) -> dict[str, list[Microbatch]]:
    """The same sequences as different microbatches."""
    samples = sequences(LENGTHS)
    padded = RowLayout(packed=False, pad_to_multiple=multiple)
    packed = RowLayout(pad_to_multiple=multiple)
    found = {"padded": [rows(samples, padded)]}
    if kind != "seq_aux_loss":  # a row is a sequence there
        found |= {
            "packed": [rows(samples, packed)],
            "long row": [rows(samples, replace(packed, capacity=60))],
            "filler": [rows(samples, packed), filler_microbatch(packed)],
            "7 trained": [rows(sequences(LENGTHS, num_trained=7), packed)],
            "1 trained": [rows(sequences(LENGTHS, num_trained=1), packed)],
        }
    if kind in ("seq_aux_loss", "z"):  # the others balance a microbatch
        found["microbatches"] = [rows(samples[:1], padded), rows(samples[1:], padded)]
    return found


def sent_to_experts() -> list[tuple[int, int]]:
    """Tokens that the last layer sent, and real ones, of a padded, a packed and a long row."""
    with device_mode():
        _, _, model, stepper = build(AUXILIARY)
        dispatcher = next(
            m.token_dispatcher
            for m in reversed(list(model.chunks[0].modules()))
            if isinstance(m, MoELayer)
        )
        found = []
        for microbatches in list(ways("aux_loss", multiple=1).values())[:3]:
            router_gradients(stepper, microbatches)
            found.append((int(dispatcher.num_out_tokens), TOPK * sum(LENGTHS)))
        return found


def losses_at_capacity() -> list[float]:
    """Main loss of the same sequences as padded rows, packed and in a long row, at capacity 1."""
    with device_mode():
        _, _, _, stepper = build([*MOE, "--moe-expert-capacity-factor", "1", "--seq-length", "40"])
        microbatches = list(ways("aux_loss", multiple=1).values())[:3]
        return [stepper.forward_backward(found).loss for found in microbatches]
