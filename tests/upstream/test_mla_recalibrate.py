"""The second pass of `--recalibrate`: its sums on every layout, and a conversion that goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_ext.mla.checkpoint import CheckpointConversion, begin, convert_layers
from megatron_ext.mla.convert import convert_layer
from megatron_ext.mla.decoder import DenseDecoder
from megatron_ext.mla.presets import preset
from megatron_ext.mla.read import read_layer
from megatron_ext.mla.recalibration import full_rank, partial_rotation, sums_file
from megatron_ext.mla.sequential import latent_output
from megatron_ext.mla.statistics import sequence_statistics
from megatron_ext.mla.statistics_file import StatisticsFile, fingerprint, save_statistics
from megatron_ext.upstream.checkpoint_tensors import on_writer
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.evaluate import parse_for_evaluation
from megatron_ext.upstream.layout import open_layout
from megatron_ext.upstream.mla_calibrate import read_calibration
from megatron_ext.upstream.mla_convert import convert_to_mla
from megatron_ext.upstream.mla_job import MlaJob
from megatron_ext.upstream.mla_recalibrate import recalibrated
from megatron_ext.weights.checks import open_checkpoint
from tests.ranks import RankPool
from tests.weights.tiny_models import Tiny, save

MODEL = Tiny(family="llama", config={"head_dim": 12, "vocab_size": 300})
LENGTH = 34
BYTES = ("--tokenizer-type", "NullTokenizer")
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
LAYOUTS = {
    "one rank": (1, ""),
    "tp2 sp": (2, TP2),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "dp2": (2, ""),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, a text and the statistics of random inputs."""
    root = tmp_path_factory.mktemp("recalibrate")
    save(MODEL, root / "model")
    draw = torch.Generator().manual_seed(0)
    letters = torch.randint(97, 123, (200,), generator=draw)
    (root / "text.txt").write_text("".join(map(chr, letters.tolist())))
    source = open_checkpoint(root / "model")
    layers = {}
    for number in range(source.architecture.num_layers):
        x_TD = torch.randn(60, source.architecture.hidden_size, generator=draw)
        layers[number] = sequence_statistics(read_layer(source, number), x_TD)
    path = root / "statistics.safetensors"
    save_statistics(path, layers, context_length=LENGTH, fingerprint=fingerprint([]))
    return root


def conversion(inputs: Path, target: Path) -> CheckpointConversion:
    config = preset(
        "transmla",
        mla_layout="deepseek",
        rope_strategy="2-norm",
        rope_pairs=3,
        rope_stride=2,
        kv_rank=14,
        calibration_data=[str(inputs / "text.txt")],
        calibration_context=LENGTH,
        calibration_tokens=5 * LENGTH,
    )
    source = open_checkpoint(inputs / "model")
    statistics = StatisticsFile.open(inputs / "statistics.safetensors")
    return CheckpointConversion.of(source, target, config=config, statistics=statistics)


def words(inputs: Path, flags: str = "") -> list[str]:
    return [*BYTES, *flags.split(), "--hf-model", str(inputs / "model")]


def second_pass(inputs: Path, target: Path, flags: str) -> list[Tensor]:
    """Moments of every layer's inputs, by one rank of a job."""
    with device_mode():
        layout = open_layout(parse_for_evaluation(words(inputs, flags), seq_length=2).megatron)
        job = conversion(inputs, target)
        on_writer(layout, lambda: begin(job))
        found = recalibrated(job, words(inputs, flags), layout=layout)
        assert found.recalibrated is not None
        return [found.recalibrated.layer(n).moment() for n in range(found.recalibrated.num_layers)]


def written_out(inputs: Path, target: Path) -> list[Tensor]:
    """The same, layer by layer in plain torch."""
    job = conversion(inputs, target)
    source, whole = job.source, full_rank(job.config, job.source.architecture)
    with device_mode():
        options = parse_for_evaluation(words(inputs), seq_length=LENGTH)
        sequences = read_calibration(options, job.config)
    decoder, found = DenseDecoder(source), []
    hidden_STD = decoder.embedded(torch.stack(sequences))
    for number in range(source.architecture.num_layers):
        x_STD = decoder.inputs(number, hidden_STD)
        x_ND = x_STD.flatten(0, 1).double()
        found.append(x_ND.T @ x_ND / len(x_ND))
        layer, _ = convert_layer(
            read_layer(source, number),
            config=whole,
            rank=whole.kv_rank,
            statistics=job.statistics_of(number),
        )
        outputs_STD = torch.stack([latent_output(layer, x_TD) for x_TD in x_STD])
        hidden_STD = decoder.advance(number, hidden_STD, outputs_STD)
    return found


def convert_partly(inputs: Path, target: Path) -> None:
    """What an interruption leaves: some layers of the model with partial rotation."""
    rotated = partial_rotation(begin(conversion(inputs, target)))
    convert_layers(begin(rotated), [0, 2], done=lambda _: None)


@pytest.mark.slow
def test_the_sums_are_those_of_one_rank_and_of_the_layers_written_out(
    ranks: RankPool, inputs: Path, tmp_path: Path
):
    expected = written_out(inputs, tmp_path / "written out")
    for name, (size, flags) in LAYOUTS.items():
        for found in ranks(size).run(second_pass, inputs, tmp_path / name, flags):
            assert len(found) == len(expected) == 4
            for got, wanted in zip(found, expected, strict=True):
                assert float((got - wanted).abs().max() / wanted.abs().max()) < 1e-5, name


@pytest.mark.slow
def test_a_second_pass_goes_on_where_it_stopped(ranks: RankPool, inputs: Path, tmp_path: Path):
    (whole,) = ranks(1).run(second_pass, inputs, tmp_path / "whole", "")
    convert_partly(inputs, tmp_path / "stopped")
    kept = partial_rotation(conversion(inputs, tmp_path / "stopped"))
    before = kept.layer_file(2).stat().st_mtime_ns
    kept.layer_file(0).unlink()
    (found,) = ranks(1).run(second_pass, inputs, tmp_path / "stopped", "")
    for got, wanted in zip(found, whole, strict=True):
        assert torch.equal(got, wanted)
    assert before and not kept.target.exists() and not kept.work.exists()
    sums = sums_file(conversion(inputs, tmp_path / "stopped"))
    made = sums.stat().st_mtime_ns
    ranks(1).run(second_pass, inputs, tmp_path / "stopped", "")
    assert sums.stat().st_mtime_ns == made  # and the text does not run again


def test_layers_of_another_text_are_never_taken(inputs: Path, tmp_path: Path):
    begin(conversion(inputs, tmp_path / "out"))
    begin(conversion(inputs, tmp_path / "out"))
    path = tmp_path / "other.txt"
    path.write_text((inputs / "text.txt").read_text()[::-1])
    other = conversion(inputs, tmp_path / "out")
    config = replace(other.config, calibration_data=[str(path)])
    with pytest.raises(ValueError, match="has layers of another conversion"):
        begin(replace(other, config=config))


def convert(inputs: Path, target: Path, flags: str) -> list[int]:
    with device_mode():
        job = MlaJob(
            source=inputs / "model",
            target=target,
            config=conversion(inputs, target).config,
            words=[*BYTES, *flags.split()],
            evaluation_text=inputs / "text.txt",
            evaluation_window=LENGTH,
            say=str,
        )
        return [summary.layer for summary in convert_to_mla(job)]


@pytest.mark.slow
def test_the_tool_converts_with_it(ranks: RankPool, inputs: Path, tmp_path: Path):
    assert ranks(2).run(convert, inputs, tmp_path / "out", TP2) == [[0, 1, 2, 3]] * 2
    assert (tmp_path / "out" / "conversion.json").is_file()
    assert not (tmp_path / "out.layers").exists()
