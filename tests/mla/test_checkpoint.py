"""Whole checkpoints: what is converted, resumed, refused and reported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ext.mla.assembly import assemble
from megatron_ext.mla.checkpoint import (
    CheckpointConversion,
    all_summaries,
    begin,
    convert_layers,
    divided,
)
from megatron_ext.mla.config import MLAConfig
from megatron_ext.mla.layer_summary import LayerSummary
from megatron_ext.mla.presets import preset
from megatron_ext.mla.read import read_layer
from megatron_ext.mla.report import PAGE, RECORD, Judgement, write_report
from megatron_ext.mla.statistics import sequence_statistics
from megatron_ext.mla.statistics_file import StatisticsFile, fingerprint, save_statistics
from megatron_ext.weights.checks import open_checkpoint, tensor_problems
from megatron_ext.weights.families import architecture_of
from tests.weights.tiny_models import MODELS, save

PLAIN = preset(
    "paper-joint", rope_strategy="high", rope_pairs=2, rope_compensation=False, kv_rank=10
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "llama"
    save(MODELS["llama tied biased"], path)
    return path


def conversion(folder: Path, target: Path, config: MLAConfig = PLAIN) -> CheckpointConversion:
    return CheckpointConversion.of(open_checkpoint(folder), target, config=config, statistics=None)


def calibrated(folder: Path, path: Path) -> StatisticsFile:
    """Statistics of random inputs."""
    source = open_checkpoint(folder)
    shape = source.architecture
    draw = torch.Generator().manual_seed(0)
    layers = {
        number: sequence_statistics(
            read_layer(source, number),
            torch.randn((40, shape.hidden_size), generator=draw),
            keep=True,
        )
        for number in range(shape.num_layers)
    }
    save_statistics(path, layers, context_length=40, fingerprint=fingerprint([]))
    return StatisticsFile.open(path)


def convert(job: CheckpointConversion, layers: list[int] | None = None) -> list[LayerSummary]:
    found: list[LayerSummary] = []
    numbers = range(job.source.architecture.num_layers) if layers is None else layers
    convert_layers(begin(job), numbers, done=found.append)
    return found


def test_the_target_has_what_its_config_says_and_all_else_is_as_it_was(
    folder: Path, tmp_path: Path
):
    job = conversion(folder, tmp_path / "out")
    convert(job)
    assemble(job, progress=lambda _: None)
    found = open_checkpoint(tmp_path / "out")
    converted = found.architecture.converted
    assert converted is not None
    assert (converted.layout, converted.num_pairs, converted.rank) == ("paper", 2, 10)
    old, new = (
        load_file(folder / "model.safetensors"),
        load_file(tmp_path / "out/model.safetensors"),
    )
    same = {name for name in old if ".self_attn." not in name}
    assert same == {name for name in new if ".self_attn." not in name}
    assert all(torch.equal(old[name], new[name]) for name in same)


def test_no_program_takes_the_target_for_the_original_family(folder: Path, tmp_path: Path):
    job = conversion(folder, tmp_path / "out")
    convert(job)
    assemble(job, progress=lambda _: None)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["model_type"] == "mha2mla" and config["base_model_type"] == "llama"
    original = json.loads((folder / "config.json").read_text())
    tensors = open_checkpoint(tmp_path / "out").source.tensors
    assert tensor_problems(tensors, architecture_of(original))


def test_stopped_after_any_layer_the_result_is_the_same(folder: Path, tmp_path: Path):
    whole = conversion(folder, tmp_path / "whole")
    convert(whole)
    assemble(whole, progress=lambda _: None)
    stopped = conversion(folder, tmp_path / "stopped")
    convert(stopped, [0, 2])
    before = stopped.layer_file(0).stat().st_mtime_ns
    again = conversion(folder, tmp_path / "stopped")
    told = convert(again)
    assert [summary.layer for summary in told] == [0, 1, 2, 3]
    assert stopped.layer_file(0).stat().st_mtime_ns == before
    assemble(again, progress=lambda _: None)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (
            tmp_path / "stopped" / name
        ).read_bytes()


@pytest.mark.parametrize("change", [{"kv_rank": 9}, {"rope_strategy": "low"}])
def test_layers_of_another_conversion_are_not_taken(folder: Path, tmp_path: Path, change: dict):
    convert(conversion(folder, tmp_path / "out"), [0])
    other = conversion(folder, tmp_path / "out", replace(PLAIN, **change))
    with pytest.raises(ValueError, match="another conversion"):
        begin(other)


def test_options_of_calibration_alone_do_not_make_another_conversion(folder: Path, tmp_path: Path):
    convert(conversion(folder, tmp_path / "out"), [0])
    begin(conversion(folder, tmp_path / "out", replace(PLAIN, calibration_data=["elsewhere.txt"])))


def test_a_damaged_layer_is_named(folder: Path, tmp_path: Path):
    job = conversion(folder, tmp_path / "out")
    convert(job, [1])
    path = job.layer_file(1)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"layer_0001\.safetensors is damaged"):
        convert(job, [1])


def test_a_nan_of_the_source_is_named_and_nothing_is_written(folder: Path, tmp_path: Path):
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"][0, 0] = torch.nan
    save_file(tensors, bad / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.k_proj\.weight"):
        convert(conversion(bad, tmp_path / "out"), [1])
    assert not conversion(bad, tmp_path / "out").layer_file(1).exists()


def test_all_that_speaks_against_a_conversion_is_said_at_once(folder: Path, tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    config = preset("best", kv_rank=400, rope_pairs=2)
    with pytest.raises(ValueError) as raised:
        conversion(folder, tmp_path / "out", config)
    said = str(raised.value)
    assert "--kv-rank 400" in said and "exists and is not empty" in said
    assert "give --calibration-data" in said


def test_pairs_that_are_to_be_found_are_found_once(folder: Path, tmp_path: Path):
    config = preset("whitened", cache_ratio=0.6)
    statistics = calibrated(folder, tmp_path / "statistics.safetensors")
    job = CheckpointConversion.of(
        open_checkpoint(folder), tmp_path / "out", config=config, statistics=statistics
    )
    found = begin(job).config
    assert found.rope_pairs > 0
    (job.work / "division.json").write_text('{"rope_pairs": 1, "rope_stride": 1}')
    assert divided(job).config.rope_pairs == 1


@pytest.mark.parametrize("layout", ["paper", "deepseek"])
def test_the_report_has_every_layer(folder: Path, tmp_path: Path, layout: str):
    pairs = {"rope_pairs": 2, "rope_stride": 1, "mla_layout": layout}
    config = preset("whitened", kv_rank=8, **pairs)
    statistics = calibrated(folder, tmp_path / "statistics.safetensors")
    job = CheckpointConversion.of(
        open_checkpoint(folder), tmp_path / "out", config=config, statistics=statistics
    )
    convert(job)
    assemble(job, progress=lambda _: None)
    judgement = Judgement(
        text="text.txt",
        window=32,
        num_tokens=64,
        before=20.0,
        after=30.0,
        difference=0.4,
        standard_error=0.1,
    )
    write_report(job, all_summaries(job), judgement=judgement)
    record = json.loads((tmp_path / "out" / RECORD).read_text())
    assert [layer["layer"] for layer in record["layers"]] == [0, 1, 2, 3]
    assert all(0 < layer["key_error"] < 1 for layer in record["layers"])
    before = record["cache_numbers_per_token_and_layer"]["before"]
    after = record["cache_numbers_per_token_and_layer"]["after"]
    assert before == 2 * 2 * 8 and after == 8 + 4 * (2 if layout == "paper" else 1)
    by_rank = record["cache_bytes_per_token_and_rank"]
    assert [row["tp_size"] for row in by_rank] == [1, 2]
    assert by_rank[1]["before"] == before * 4 * 2 // 2
    page = (tmp_path / "out" / PAGE).read_text()
    assert page.count("<svg") == 3 and "perplexity 20.0000 -&gt; 30.0000" in page
