"""Whole checkpoints between Hugging Face's layout (or GGUF) and Megatron's ``torch_dist``.

One parameter is held at a time and no model is built.  The output is written beside its name and
moved there at the end, so an interrupted run leaves nothing that looks complete.
Invariant the tests check: to Megatron and back is the identity, bit for bit, config.json included;
Megatron loads the output on any layout.  Not covered: optimizer states, random states.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_ext.upstream import checkpoint_folder as folders
from megatron_ext.upstream.arguments import parse
from megatron_ext.upstream.checkpoint_fit import model_differences
from megatron_ext.upstream.checkpoint_reading import common_of
from megatron_ext.upstream.checkpoint_shared import problems_alone
from megatron_ext.upstream.checkpoint_source import newest_intact, older
from megatron_ext.upstream.convert_target import check_target, in_place, keep_small_files
from megatron_ext.upstream.hf_config import megatron_arguments
from megatron_ext.upstream.hf_describe import describe
from megatron_ext.upstream.torch_dist import (
    Implementation,
    Place,
    TorchDistReader,
    TorchDistWriter,
    place_of,
    places_of,
)
from megatron_ext.weights.architecture import Architecture
from megatron_ext.weights.checks import Checkpoint, FiniteReader, not_finite, open_checkpoint
from megatron_ext.weights.families import architecture_of, parameters
from megatron_ext.weights.operators import WHOLE, fill
from megatron_ext.weights.sources import CONFIG, CheckpointError, TensorInfo, listed, read_json
from megatron_ext.weights.stream import checkpoint_tensors
from megatron_ext.weights.table import Parameter
from megatron_ext.weights.writer import CheckpointWriter

HF_FOLDER = "hf"
"""Beside the weights of a converted checkpoint: its config.json and tokenizer, for the way back."""
RECORDED_LENGTH = 4096
"""--seq-length recorded in a converted checkpoint, if the model can be that long."""
OF_ONE_RANK = ("rank", "local_rank")
"""Arguments that are not the checkpoint's."""
Progress = Callable[[int], object]
"""Called with the bytes of each parameter that is written."""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What will be written, and how; nothing is before ``run``."""

    tensors: Mapping[str, TensorInfo]
    """Of the output, in the order they are written."""
    run: Callable[[Progress], None]

    @property
    def num_bytes(self) -> int:
        """Bytes of all values."""
        return sum(info.num_bytes for info in self.tensors.values())


def is_hf(path: Path) -> bool:
    """Whether a path is a Hugging Face directory or a file of weights."""
    return path.suffix in (".gguf", ".safetensors") or (path / CONFIG).is_file()


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


def to_hf(
    source: Path,
    target: Path,
    *,
    step: int | None = None,
    like: Path | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5 * 10**9,
) -> Conversion:
    """From a ``torch_dist`` checkpoint of any layout to a Hugging Face directory.

    step: of the checkpoint; None = the one to load.
    like: directory of the config.json and tokenizer; None = what `to_megatron` has kept, else a
        config.json made from the checkpoint's arguments.

    Raises:
        ValueError: the source or ``like`` cannot be used, or the target exists; all reasons.
    """
    folder = _folder_of(source, step=step)
    saved_args = common_of(folder).get("args")
    kept = folder.parent / HF_FOLDER
    like = like or (kept if (kept / CONFIG).is_file() else None)
    if saved_args is None and like is None:
        raise ValueError(f"{folder} has no arguments beside its tensors. Give --like.")
    config = _read_config(like) if like else describe(saved_args or Namespace())
    architecture = architecture_of(config)
    expected = Namespace(**megatron_arguments(architecture, max_length=0))
    reader = TorchDistReader(folder)
    found, problems = _find(reader, architecture)
    problems += model_differences(expected, saved_args or Namespace())
    if problems:
        raise CheckpointError(f"{folder} with the config.json of {like or 'its flags'}", problems)
    tensors = {
        name: TensorInfo(
            shape=shape,
            dtype=torch.float32
            if parameter.is_bits
            else _wanted(parameter, dtype) or reader.info(place)[1],  # type: ignore[index]  # `_find` has seen it
        )
        for parameter, place in found
        for name, shape in parameter.operator.tensors().items()
    }
    writer = CheckpointWriter(
        target, tensors=tensors, config=config, tokenizer=like, max_file_bytes=max_file_bytes
    )

    def run(progress: Progress) -> None:
        bad = []
        with writer:
            for parameter, place in found:
                values = reader.read(place)
                for name, part in checkpoint_tensors(parameter, values).items():
                    writer.add(name, part)
                    if not torch.isfinite(part).all():
                        bad.append(name)
                progress(sum(tensors[name].num_bytes for name in parameter.operator.tensors()))
            if bad:
                raise CheckpointError(folder, not_finite(bad))

    return Conversion(tensors=tensors, run=run)


def _folder_of(source: Path, *, step: int | None) -> Path:
    """The checkpoint to convert: the one named, or the newest intact one."""
    is_named = folders.is_complete(source) or step is not None
    folder = source if folders.is_complete(source) else folders.newest(source, step=step)
    if folder is None:
        broken = "; ".join(folders.incomplete(source))
        raise ValueError(
            f"{source} is no checkpoint: neither a Hugging Face directory (config.json) or GGUF "
            f"file nor a complete torch_dist checkpoint{f' ({broken})' if broken else ''}. Check "
            "the path."
        )
    before = [] if is_named else older(folder)
    return newest_intact(folder, older=before, problems_in=problems_alone, is_told=True)


def _find(
    reader: TorchDistReader, architecture: Architecture
) -> tuple[list[tuple[Parameter, Place]], list[str]]:
    """Every parameter and its place; those that are missing or misshapen, as sentences."""
    embedding = reader.info(Place(key="embedding.word_embeddings.weight"))
    padded = embedding[0][0] if embedding else 0
    found, missing, misshapen = [], [], []
    for parameter in parameters(architecture, padded_vocab_size=padded):
        if parameter.is_copy:
            continue
        places = [p for p in places_of(parameter, architecture) if reader.info(p) is not None]
        if not places:
            missing.append(parameter.name)
            continue
        shape, _ = reader.info(places[0]) or ((), None)
        whole = parameter.operator.local_shape(WHOLE)
        if shape != whole:
            misshapen.append(f"{parameter.name} is {list(shape)}, not {list(whole)}")
        found.append((parameter, places[0]))
    problems = listed(missing, "missing in the checkpoint. Use the config.json that belongs to it")
    problems += listed(misshapen, "other shapes than config.json says. Use the one that belongs")
    return found, problems


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
        keep_small_files(checkpoint.source, partial / HF_FOLDER)
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
    args = parse([*words.split(), *kind, *mtp, "--hf-model", str(source)]).megatron
    saved = {name: value for name, value in vars(args).items() if name not in OF_ONE_RANK}
    return Namespace(**saved | {"hf_model": "", "consumed_train_samples": 0})


def _read_config(folder: Path) -> dict[str, Any]:
    problems: list[str] = []
    config = read_json(folder / CONFIG, problems)
    if problems:
        raise CheckpointError(folder, problems)
    return config


def _wanted(parameter: Parameter, dtype: torch.dtype | None) -> torch.dtype | None:
    return torch.float32 if dtype and parameter.is_float32 else dtype


def _dtype_of(
    parameter: Parameter, tensors: Mapping[str, TensorInfo], *, wanted: torch.dtype | None
) -> torch.dtype:
    """The type of a parameter: the wanted one, else the widest of its tensors."""
    if parameter.is_bits:
        return torch.int32
    kinds = [tensors[name].dtype for name in parameter.operator.tensors()]
    widest = max((k for k in kinds if isinstance(k, torch.dtype)), key=lambda k: k.itemsize)
    return _wanted(parameter, wanted) or widest


def _main_dtype(tensors: Mapping[str, TensorInfo]) -> torch.dtype:
    """The type of most values."""
    sizes: dict[torch.dtype, int] = {}
    for info in tensors.values():
        if isinstance(info.dtype, torch.dtype):
            sizes[info.dtype] = sizes.get(info.dtype, 0) + info.num_bytes
    return max(sizes, key=lambda kind: sizes[kind])
