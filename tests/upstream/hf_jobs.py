"""What a rank does in the tests of checkpoints: build from config.json, fill, compute, export."""

from __future__ import annotations

import copy
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import MegatronModule
from safetensors.torch import load_file
from torch import Tensor

from megatron_ext.upstream import arguments
from megatron_ext.upstream.checkpoint import load_weights, save_weights
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.hf_export import export_tensors
from megatron_ext.upstream.hf_flags import checkpoint_values
from megatron_ext.upstream.hf_weights import fill_chunks
from megatron_ext.upstream.layout import Layout, open_layout
from megatron_ext.upstream.model import bare, build_chunks
from megatron_ext.weights.checks import Checkpoint, open_checkpoint

RUN = [
    *("--seq-length", "64", "--train-iters", "1", "--lr", "1e-3", "--global-batch-size", "2"),
    *("--tokenizer-type", "NullTokenizer"),
]


def parse(flags: Sequence[str], checkpoint: Checkpoint, changed: Mapping[str, Any]) -> Namespace:
    """Megatron's arguments for a checkpoint; ``changed`` overrides what the checkpoint says."""
    parser, words = arguments.build_parser(), [*RUN, *flags]
    args = copy.deepcopy(parser.read(words)[0])
    args.rank, args.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    args._is_global_batch_size_explicitly_specified = True
    values = checkpoint_values(args, parser.given(words), architecture=checkpoint.architecture)
    for name, value in (values | dict(changed)).items():
        setattr(args, name, value)
    arguments._fill_in(args)
    problems = arguments.megatron_problems(args, parser)
    assert not problems, problems
    return args


def build(args: Namespace, layout: Layout) -> list[MegatronModule]:
    """Chunks with Megatron's own random weights."""
    return build_chunks(args, layout, wrap=False)


class Job:
    """One layout, on which checkpoint after checkpoint is built; use it inside `device_mode`."""

    def __init__(self, flags: str) -> None:
        self.flags = flags.split()
        self._layout: Layout | None = None

    @property
    def layout(self) -> Layout:
        assert self._layout is not None, "the first model opens the layout"
        return self._layout

    def build(self, folder: Path, **changed: Any) -> tuple[Checkpoint, list[MegatronModule]]:
        """The checkpoint and this rank's chunks for it, not yet filled."""
        checkpoint = open_checkpoint(folder)
        args = parse(self.flags, checkpoint, changed)
        self._layout = self._layout or open_layout(args)
        return checkpoint, [chunk.eval() for chunk in build(args, self.layout)]

    def filled(self, folder: Path, **changed: Any) -> tuple[Checkpoint, list[MegatronModule]]:
        checkpoint, chunks = self.build(folder, **changed)
        fill_chunks(chunks, self.layout, checkpoint)
        return checkpoint, chunks

    def logits(self, chunks: list[MegatronModule], tokens: Tensor) -> Tensor | None:
        """Logits [B, S, V + padding] on the last stage, hidden states being passed on by hand."""
        pp, tp = self.layout.groups.pp, self.layout.groups.tp
        models = [bare(chunk) for chunk in chunks]
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        hidden_shape = (tokens.shape[1], tokens.shape[0], models[0].config.hidden_size)
        hidden = torch.empty(0)
        num_places = len(models) * pp.size()
        for place in range(num_places):
            stage, chunk = place % pp.size(), chunks[place // pp.size()]
            if stage == pp.rank():
                bare(chunk).set_input_tensor(hidden if place else None)
                hidden = chunk(tokens, positions, None).contiguous()
            else:
                hidden = torch.empty(hidden_shape, dtype=models[0].config.params_dtype)
            if place < num_places - 1:
                dist.broadcast(hidden, src=dist.get_global_rank(pp, stage), group=pp)
        if pp.rank() != pp.size() - 1:
            return None
        parts = [torch.empty_like(hidden) for _ in range(tp.size())]
        dist.all_gather(parts, hidden, group=tp)
        return torch.cat(parts, dim=-1)

    def exported(self, checkpoint: Checkpoint, chunks: list[MegatronModule]) -> dict[str, Tensor]:
        """The export, on rank 0."""
        return dict(export_tensors(chunks, self.layout, checkpoint.architecture))


def is_same(folder: Path, tensors: Mapping[str, Tensor]) -> bool:
    """Whether tensors are those of a folder's file, types included, bit for bit."""
    file = load_file(folder / "model.safetensors")
    return file.keys() == tensors.keys() and all(
        torch.equal(file[name], tensors[name]) and file[name].dtype == tensors[name].dtype
        for name in file
    )


def visit(
    folders: Mapping[str, Path], flags: str, tokens: Tensor
) -> dict[str, tuple[Tensor | None, bool | None]]:
    """For every checkpoint: logits, where this rank has them, and on rank 0 if the export is it."""
    job = Job(flags)
    results = {}
    with device_mode(), torch.no_grad():
        for name, folder in folders.items():
            checkpoint, chunks = job.filled(folder)
            logits = job.logits(chunks, tokens)
            tensors = job.exported(checkpoint, chunks)
            results[name] = logits, is_same(folder, tensors) if dist.get_rank() == 0 else None
    return results


def embedding_and_output(folder: Path, flags: str) -> tuple[Tensor | None, Tensor | None]:
    """This rank's shards of the embedding and of the output layer, where it has them."""
    job = Job(flags)
    with device_mode():
        _, chunks = job.filled(folder)
        found: dict[str, Tensor] = {}
        for chunk in chunks:
            found |= bare(chunk).state_dict()
        return found.get("embedding.word_embeddings.weight"), found.get("output_layer.weight")


def save_torch_dist(folder: Path, flags: str, out: Path) -> None:
    job = Job(flags)
    with device_mode():
        _, chunks = job.filled(folder)
        save_weights([bare(chunk) for chunk in chunks], job.layout, folder=out)


def export_torch_dist(folder: Path, flags: str, saved: Path) -> bool:
    """Whether the export of a torch_dist checkpoint is the folder's file."""
    job = Job(flags)
    with device_mode():
        checkpoint, chunks = job.build(folder)
        load_weights([bare(chunk) for chunk in chunks], job.layout, folder=saved)
        tensors = job.exported(checkpoint, chunks)
        return is_same(folder, tensors) if dist.get_rank() == 0 else True


def swap_gate_and_up(model: GPTModel) -> None:
    for name, parameter in model.named_parameters():
        if "linear_fc1.weight" in name:
            parameter.copy_(torch.cat(parameter.chunk(2)[::-1]))


def wrong_logits(folders: Mapping[str, Path], tokens: Tensor, cases: Mapping[str, Any]) -> dict:
    """Logits of every case (checkpoint, changed arguments, whether gate and up are swapped)."""
    job = Job("")
    results = {}
    with device_mode(), torch.no_grad():
        for case, (name, changed, is_swapped) in cases.items():
            _, chunks = job.filled(folders[name], **changed)
            if is_swapped:
                swap_gate_and_up(bare(chunks[0]))
            results[case] = job.logits(chunks, tokens)
    return results


def gradients(folder: Path, flags: str, tokens: Tensor) -> dict[str, Tensor]:
    """Gradients of the summed loss under Hugging Face's names, on rank 0."""
    job = Job(flags)
    with device_mode():
        checkpoint, chunks = job.filled(folder)
        model = bare(chunks[0]).train()
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        model(tokens, positions, None, labels=tokens.roll(-1, 1)).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if getattr(parameter, "sequence_parallel", False):
                    dist.all_reduce(parameter.grad, group=job.layout.groups.tp)
                parameter.copy_(parameter.grad)
        return job.exported(checkpoint, chunks)


def mismatch(folder: Path, other: Path) -> str:
    """The error of filling a model that was built for another checkpoint."""
    job = Job("--tensor-model-parallel-size 2")
    with device_mode():
        _, chunks = job.build(folder)
        try:
            fill_chunks(chunks, job.layout, open_checkpoint(other))
        except ValueError as error:
            return str(error)
    return ""
