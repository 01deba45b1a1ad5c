"""What a rank does in the tests of calibration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_ext.mla.config import MLAConfig
from megatron_ext.mla.statistics import LayerStatistics
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.evaluate import FrozenModel, open_stepper, parse_for_evaluation
from megatron_ext.upstream.mla_calibrate import calibrate
from megatron_ext.upstream.pipeline import build_communicator
from megatron_ext.upstream.step import Stepper
from megatron_ext.weights.checks import open_checkpoint
from tests.upstream.hf_jobs import Job

Statistics = dict[int, LayerStatistics]


def calibrated(
    folders: Mapping[str, Path], flags: str, sequences: list[Tensor], config: MLAConfig
) -> dict[str, Statistics]:
    """The statistics of every checkpoint, on one layout."""
    job, found = Job(flags), {}
    with device_mode():
        for name, folder in folders.items():
            checkpoint, chunks = job.filled(folder)
            model: Any = FrozenModel(chunks=chunks, config=get_model_config(chunks[0]))
            communicator = build_communicator(model.config, job.layout, scatter_gather=False)
            stepper = Stepper(
                model=model,
                layout=job.layout,
                communicator=communicator,
                vocab_size=checkpoint.architecture.vocab_size,
            )
            found[name] = calibrate(stepper, checkpoint.architecture, sequences, config=config)
    return found


def broken(
    folder: Path, flags: str, sequences: list[Tensor], config: MLAConfig, *, layer: int
) -> tuple[int, list[str]]:
    """How many layers' statistics a good model has here; what is said of unusable ones."""
    words = ["--hf-model", str(folder), "--tokenizer-type", "NullTokenizer", *flags.split()]
    with device_mode():
        stepper = open_stepper(parse_for_evaluation(words, seq_length=len(sequences[0])))
        architecture, said = open_checkpoint(folder).architecture, []

        def refusal() -> str:
            with pytest.raises(ValueError) as raised:
                calibrate(stepper, architecture, sequences, config=config)
            return str(raised.value)

        num_layers = len(calibrate(stepper, architecture, sequences, config=config))
        for chunk in stepper.model.bare_chunks:
            decoder: Any = chunk.decoder
            for module in decoder.layers:
                if module.layer_number - 1 == layer:
                    with torch.no_grad():
                        module.self_attention.linear_qkv.weight[0, 0] = torch.inf
        said.append(refusal())
        stepper.model.config.transformer_impl = "transformer_engine"
        said.append(refusal())
        return num_layers, said
