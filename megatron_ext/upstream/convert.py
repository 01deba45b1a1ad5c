"""Whole checkpoints from Hugging Face's layout or GGUF to Megatron's ``torch_dist``.

One parameter is held at a time and no model is built.  The output is written beside its name and
moved there at the end, so an interrupted run leaves nothing that looks complete.
Invariant the tests check: to Megatron and back (`convert_hf`) is the identity, bit for bit,
config.json included; Megatron loads the output on any layout.  Not covered: optimizer states,
random states.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

import torch

from megatron_ext.options.ranges import BadOptions
from megatron_ext.upstream import checkpoint_folder as folders
from megatron_ext.upstream.arguments import read_options
from megatron_ext.upstream.convert_hf import wanted_dtype
from megatron_ext.upstream.convert_target import (
    HF_FOLDER,
    Conversion,
    Progress,
    check_target,
    in_place,
    keep_small_files,
)
from megatron_ext.upstream.hf_config import megatron_arguments
from megatron_ext.upstream.torch_dist import (
    Implementation,
    TorchDistWriter,
    place_of,
)
from megatron_ext.weights.architecture import Architecture
from megatron_ext.weights.checks import Checkpoint, FiniteReader, open_checkpoint
from megatron_ext.weights.families import parameters
from megatron_ext.weights.operators import WHOLE, fill
from megatron_ext.weights.sources import CheckpointError, TensorInfo
from megatron_ext.weights.table import Parameter

RECORDED_LENGTH = 4096
"""--seq-length recorded in a converted checkpoint, if the model can be that long."""
OF_ONE_RANK = ("rank", "local_rank")
"""Arguments that are not the checkpoint's."""


def to_megatron(
    source: Path,
    target: Path,
    *,
    implementation: Implementation,
    dtype: torch.dtype | None = None,
    drop_mtp: bool = False,
) -> Conversion:
    """From a Hugging Face directory or GGUF file to a ``release`` under ``target``.

    implementation: of the layers of the models that load it.
    dtype: of the weights; None = as they are.

    Raises:
        ValueError: the source cannot be used, or the target exists; all reasons at once.
    """
    checkpoint = open_checkpoint(source, drop_mtp=drop_mtp)
    main = dtype or _main_dtype(checkpoint.source.tensors)
    args = _arguments(source, checkpoint.architecture, dtype=main, drop_mtp=drop_mtp)
    table = [
        parameter
        for parameter in parameters(
            checkpoint.architecture, padded_vocab_size=args.padded_vocab_size
        )
        if not parameter.is_copy
    ]
    tensors = {
        parameter.name: TensorInfo(
            shape=parameter.operator.local_shape(WHOLE),
            dtype=_dtype_of(parameter, checkpoint.source.tensors, wanted=dtype),
        )
        for parameter in table
    }
    conversion = Conversion(
        tensors=tensors,
        run=lambda progress: _write_megatron(
            checkpoint,
            target,
            table=table,
            tensors=tensors,
            args=args,
            implementation=implementation,
            progress=progress,
        ),
    )
    check_target(target, num_bytes=conversion.num_bytes)
    return conversion


def _write_megatron(
    checkpoint: Checkpoint,
    target: Path,
    *,
    table: list[Parameter],
    tensors: Mapping[str, TensorInfo],
    args: Namespace,
    implementation: Implementation,
    progress: Progress,
) -> None:
    with in_place(target) as partial:
        writer = TorchDistWriter(partial / folders.RELEASE)
        read = FiniteReader(checkpoint.source)
        try:
            for parameter in table:
                info = tensors[parameter.name]
                assert isinstance(info.dtype, torch.dtype), f"{parameter.name}: checked when opened"
                values = torch.empty(info.shape, dtype=info.dtype)
                fill(values, parameter.operator, shard=WHOLE, read=read)
                place = place_of(parameter, checkpoint.architecture, implementation=implementation)
                writer.add(place, values)
                progress(info.num_bytes)
            if problems := read.problems():
                raise CheckpointError(checkpoint.source.location, problems)
            writer.finish({"args": args, "checkpoint_version": 3.0, "iteration": 0})
        finally:
            writer.close()
            checkpoint.source.close()
        keep_small_files(checkpoint.source.location, partial / HF_FOLDER, config=checkpoint.config)
        (partial / folders.TRACKER).write_text(folders.RELEASE, encoding="utf-8")


def _arguments(
    source: Path, architecture: Architecture, *, dtype: torch.dtype, drop_mtp: bool
) -> Namespace:
    """Megatron's arguments of a model with this architecture, as a run would have saved them."""
    length = min(RECORDED_LENGTH, architecture.max_positions, architecture.sliding_window or 2**30)
    megatron_arguments(architecture, max_length=length)  # what it refuses, `parse` would exit with
    words = f"--seq-length {length} --train-iters 1 --lr 1 --global-batch-size 1"
    words += " --tokenizer-type NullTokenizer"
    kind = {torch.bfloat16: ["--bf16"], torch.float16: ["--fp16"]}.get(dtype, [])
    mtp = ["--drop-mtp-layers"] if drop_mtp else []
    try:
        args = read_options([*words.split(), *kind, *mtp, "--hf-model", str(source)]).megatron
    except BadOptions as refused:
        problems = [f"Megatron, in the words of its flags: {text}" for text in refused.problems]
        raise CheckpointError(source, problems) from refused
    saved = {name: value for name, value in vars(args).items() if name not in OF_ONE_RANK}
    return Namespace(**saved | {"hf_model": "", "consumed_train_samples": 0})


def _dtype_of(
    parameter: Parameter, tensors: Mapping[str, TensorInfo], *, wanted: torch.dtype | None
) -> torch.dtype:
    """The type of a parameter: the wanted one, else the widest of its tensors."""
    if parameter.is_bits:
        return torch.int32
    kinds = [tensors[name].dtype for name in parameter.operator.tensors()]
    widest = max((k for k in kinds if isinstance(k, torch.dtype)), key=lambda k: k.itemsize)
    return wanted_dtype(parameter, wanted) or widest


def _main_dtype(tensors: Mapping[str, TensorInfo]) -> torch.dtype:
    """The type of most values."""
    sizes: dict[torch.dtype, int] = {}
    for info in tensors.values():
        if isinstance(info.dtype, torch.dtype):
            sizes[info.dtype] = sizes.get(info.dtype, 0) + info.num_bytes
    return max(sizes, key=lambda kind: sizes[kind])
