"""The dense decoder around attention, and checkpoints whose layers are fitted in order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_ext.mla.checkpoint import (
    CheckpointConversion,
    all_summaries,
    begin,
    convert_layers_in_order,
)
from megatron_ext.mla.decoder import DenseDecoder
from megatron_ext.mla.forward import attention_output
from megatron_ext.mla.presets import preset
from megatron_ext.mla.problems import conversion_problems
from megatron_ext.mla.read import read_layer
from megatron_ext.weights.checks import open_checkpoint
from tests.weights.tiny_models import MODELS, save, tokens


@pytest.mark.parametrize("name", ["llama tied biased", "qwen3"])
def test_hidden_states_are_those_of_transformers(tmp_path: Path, name: str):
    save(MODELS[name], tmp_path / "tiny")
    source = open_checkpoint(tmp_path / "tiny")
    decoder, ids = DenseDecoder(source), tokens()
    hidden_STD = decoder.embedded(ids)
    for number in range(source.architecture.num_layers):
        layer = read_layer(source, number)
        x_STD = decoder.inputs(number, hidden_STD)
        outputs_STD = torch.stack([attention_output(layer, x_TD) for x_TD in x_STD])
        hidden_STD = decoder.advance(number, hidden_STD, outputs_STD)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "tiny", local_files_only=True, trust_remote_code=False
    )
    with torch.no_grad():
        expected_STD = model.model(ids).last_hidden_state
    found_STD = model.model.norm(hidden_STD)
    torch.testing.assert_close(found_STD, expected_STD, rtol=0, atol=1e-5)


def test_layers_of_a_checkpoint_are_fitted_in_order(tmp_path: Path):
    """All of them, once each, with and without the fit, which changes what comes out."""
    save(MODELS["llama"], tmp_path / "tiny")
    source = open_checkpoint(tmp_path / "tiny")
    draw = torch.Generator().manual_seed(1)
    sequences = list(torch.randint(99, (8, 32), generator=draw))
    errors = {}
    for is_fitted in (True, False):
        config = preset(
            "whitened",
            rope_pairs=3,
            kv_rank=14,
            sequential_compensation=is_fitted,
            calibration_data=["text"],
        )
        target = tmp_path / f"out {is_fitted}"
        job = begin(
            CheckpointConversion.of(source, target, config=config, statistics=None)
            if is_fitted
            else CheckpointConversion(source=source, target=target, config=config, statistics=None)
        )
        told = []
        convert_layers_in_order(job, sequences, done=told.append)
        assert all_summaries(job) == told and [s.layer for s in told] == [0, 1, 2, 3]
        errors[is_fitted] = told
    assert errors[True][0].output_error != errors[False][0].output_error
    assert all(0 < s.key_error < 1 for s in errors[True])


def test_what_cannot_be_fitted_in_order_is_said(tmp_path: Path):
    save(MODELS["mixtral"], tmp_path / "tiny")
    shape = open_checkpoint(tmp_path / "tiny").architecture
    config = preset("best", cache_ratio=0.7, sequential_compensation=True)
    said = "\n".join(conversion_problems(config, shape))
    assert "experts of a mixtral" in said and "without --calibration-data" in said
    assert "that are to be found" in said
