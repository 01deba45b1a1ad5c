"""Checkpoints into Hugging Face's layout: Megatron's ``torch_dist``, GGUF and Hugging Face's own.

One tensor is held at a time; the output is complete or absent.
Invariant the tests check: what `convert.to_megatron` has written comes back bit for bit,
config.json included.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from megatron_ext.upstream import checkpoint_folder as folders
from megatron_ext.upstream.checkpoint_fit import model_differences
from megatron_ext.upstream.checkpoint_reading import common_of
from megatron_ext.upstream.checkpoint_shared import problems_alone
from megatron_ext.upstream.checkpoint_source import newest_intact, older
from megatron_ext.upstream.convert_target import HF_FOLDER, Conversion, Progress, small_files
from megatron_ext.upstream.hf_config import megatron_arguments
from megatron_ext.upstream.hf_describe import describe
from megatron_ext.upstream.hf_source import RECORD
from megatron_ext.upstream.torch_dist import Place, TorchDistReader, places_of
from megatron_ext.weights.architecture import Architecture
from megatron_ext.weights.checks import FiniteReader, not_finite, open_checkpoint
from megatron_ext.weights.families import architecture_of, parameters
from megatron_ext.weights.operators import WHOLE, Block
from megatron_ext.weights.sources import CheckpointError, TensorInfo
from megatron_ext.weights.stream import checkpoint_tensors
from megatron_ext.weights.table import Parameter
from megatron_ext.weights.weight_files import CONFIG, listed, read_json
from megatron_ext.weights.writer import CheckpointWriter

logger = logging.getLogger(__name__)


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
    like: directory of the config.json and tokenizer; None = what `to_megatron` has kept beside the
        checkpoint or in it, else a config.json made from the checkpoint's arguments.

    Raises:
        ValueError: the source or ``like`` cannot be used, or the target exists; all reasons.
    """
    folder = _folder_of(source, step=step)
    saved_args = common_of(folder).get("args")
    kept = folder.parent / HF_FOLDER
    like = like or (kept if (kept / CONFIG).is_file() else None)
    if saved_args is None and like is None:
        raise ValueError(f"{folder} has no arguments beside its tensors. Give --like.")
    record = getattr(saved_args, RECORD, None)
    if like:
        config = _read_config(like)
    else:
        config = record["config"] if record else describe(saved_args or Namespace())
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
            else wanted_dtype(parameter, dtype) or reader.info(place)[1],  # type: ignore[index]  # `_find` has seen it
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


def hf_again(
    source: Path,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    drop_mtp: bool = False,
    max_file_bytes: int = 5 * 10**9,
) -> Conversion:
    """From a GGUF file, or a Hugging Face directory of any form, to a Hugging Face directory.

    dtype: of the weights; None = as they are, float32 from GGUF.

    Raises:
        ValueError: the source cannot be used, or the target exists; all reasons at once.
    """
    checkpoint = open_checkpoint(source, drop_mtp=drop_mtp)
    for note in checkpoint.notes:
        logger.warning("%s: %s", source, note)
    found = checkpoint.source.tensors
    tensors = {
        name: TensorInfo(
            shape=shape,
            dtype=(None if parameter.is_bits else wanted_dtype(parameter, dtype))
            or found[name].dtype,
        )
        for parameter in parameters(checkpoint.architecture)
        if not parameter.is_copy
        for name, shape in parameter.operator.tensors().items()
    }

    def run(progress: Progress) -> None:
        read = FiniteReader(checkpoint.source)
        with small_files(checkpoint.source.location) as folder, writer(folder) as writing:
            for name, info in tensors.items():
                writing.add(name, read(Block(name=name, rows=slice(0, info.shape[0]))))
                progress(info.num_bytes)
            checkpoint.source.close()
            if problems := read.problems():
                raise CheckpointError(source, problems)

    def writer(folder: Path | None) -> CheckpointWriter:
        return CheckpointWriter(
            target,
            tensors=tensors,
            config=checkpoint.config,
            tokenizer=folder,
            max_file_bytes=max_file_bytes,
        )

    writer(None)  # looks at the target
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


def _read_config(folder: Path) -> dict[str, Any]:
    problems: list[str] = []
    config = read_json(folder / CONFIG, problems)
    if problems:
        raise CheckpointError(folder, problems)
    return config


def wanted_dtype(parameter: Parameter, dtype: torch.dtype | None) -> torch.dtype | None:
    """The type asked for, of a parameter that may have to stay in float32."""
    return torch.float32 if dtype and parameter.is_float32 else dtype
