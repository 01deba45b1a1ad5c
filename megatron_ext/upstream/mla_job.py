"""What a conversion to latent attention is asked for, and what is known before it begins."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_ext.mla.checkpoint import CheckpointConversion
from megatron_ext.mla.config import MLAConfig
from megatron_ext.upstream.convert_hf import to_hf
from megatron_ext.upstream.convert_target import is_hf

_SOURCE = "source"
_LOOK_AGAIN_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class MlaJob:
    """What a command line asks for."""

    source: Path
    """Hugging Face directory, GGUF file, or torch_dist checkpoint."""
    target: Path
    config: MLAConfig
    words: Sequence[str] = ()
    """Megatron's flags: the layout."""
    dtype: torch.dtype | None = None
    """Of the weights; None = as they are."""
    evaluation_text: Path | None = None
    evaluation_window: int = 2048
    """Tokens."""
    max_windows: int | None = None
    say: Callable[[str], object]
    """Told of what is done, on the first rank."""

    @property
    def work(self) -> Path:
        """Where the parts of an unfinished conversion are."""
        return CheckpointConversion.work_of(self.target)


def model_lengths(job: MlaJob) -> dict[str, int]:
    """Tokens of the sequences that the model will see, by flag."""
    config, lengths = job.config, {}
    if config.needs_statistics and config.calibration_data:
        lengths["--calibration-context"] = config.calibration_context
    if job.evaluation_text is not None:
        lengths["--evaluation-window"] = job.evaluation_window
    return lengths


def too_long(lengths: Mapping[str, int], max_positions: int) -> list[str]:
    """What is wrong with `model_lengths`, one sentence each."""
    return [
        f"{flag} {length}: the checkpoint is made for {max_positions} positions. Use so many or "
        "less."
        for flag, length in lengths.items()
        if length > max_positions
    ]


def hf_source(job: MlaJob) -> Path:
    """The source itself, or what a torch_dist checkpoint becomes first.

    By the first rank, before there is a process group; the others wait for the folder's name.
    """
    if not job.source.exists():
        raise ValueError(f"{job.source} does not exist. Check the path.")
    if is_hf(job.source):
        return job.source
    found = job.work / _SOURCE
    is_first = int(os.environ.get("RANK", "0")) == 0
    if is_first and not found.is_dir():
        job.work.mkdir(parents=True, exist_ok=True)
        to_hf(job.source, found).run(lambda _: None)
    while not found.is_dir():  # its writer moves it there at the end; torchrun ends us if it fails
        time.sleep(_LOOK_AGAIN_SECONDS)
    return found
