"""The tool that converts to latent attention: on ranks, from every kind of checkpoint, judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_ext.mla.presets import preset
from megatron_ext.upstream import convert, mla_command
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.mla_convert import convert_to_mla
from megatron_ext.upstream.mla_job import MlaJob
from megatron_ext.weights.checks import open_checkpoint
from tests.ranks import RankPool
from tests.weights.tiny_models import Tiny, save

BYTES = ("--tokenizer-type", "NullTokenizer")
MODEL = Tiny(family="llama", config={"head_dim": 12, "vocab_size": 300})
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and two texts."""
    root = tmp_path_factory.mktemp("mla")
    save(MODEL, root / "model")
    draw = torch.Generator().manual_seed(0)
    for name in ("calibration", "evaluation"):
        letters = torch.randint(97, 123, (700,), generator=draw)
        (root / f"{name}.txt").write_text("".join(map(chr, letters.tolist())))
    return root


def job(
    inputs: Path, target: Path, *, source: str = "model", words: tuple = (), **options
) -> MlaJob:
    config = preset(
        "best",
        mla_layout="deepseek",
        rope_pairs=3,
        rope_stride=2,
        cache_ratio=0.6,
        calibration_data=[str(inputs / "calibration.txt")],
        calibration_context=64,
        calibration_tokens=512,
        calibration_kept=2,
        **options,
    )
    return MlaJob(
        source=inputs / source,
        target=target,
        config=config,
        words=[*BYTES, *words],
        evaluation_text=inputs / "evaluation.txt",
        evaluation_window=64,
        say=str,
    )


def run(one: MlaJob) -> list[int]:
    """The layers, as this rank is told of them."""
    with device_mode():
        return [summary.layer for summary in convert_to_mla(one)]


def run_from_torch_dist(inputs: Path, target: Path) -> None:
    with device_mode():
        saved = convert.to_megatron(inputs / "model", inputs / "saved", implementation="local")
        saved.run(lambda _: None)
    run(job(inputs, target, source="saved"))


@pytest.mark.slow
def test_the_same_on_two_ranks_and_from_torch_dist(ranks: RankPool, inputs: Path, tmp_path: Path):
    """E13 through the tool: products and perplexity, not factors, are compared."""
    names = {"one": 1, "tp2": 2}
    for name, size in names.items():
        words = TP2 if name == "tp2" else ()
        found = ranks(size).run(run, job(inputs, tmp_path / name, words=words))
        assert found == [[0, 1, 2, 3]] * size
        assert not (tmp_path / f"{name}.layers").exists()
    ranks(1).run(run_from_torch_dist, inputs, tmp_path / "torch_dist")
    records = {
        name: json.loads((tmp_path / name / "conversion.json").read_text())
        for name in (*names, "torch_dist")
    }
    one = records["one"]["judgement"]
    assert one["before"] > 1 and one["after"] != one["before"]
    # The same model in another order of sums; then refits, which multiply what rounding left.
    for name, record in records.items():
        assert record["judgement"]["before"] == pytest.approx(one["before"], rel=1e-5), name
        assert record["judgement"]["after"] == pytest.approx(one["after"], rel=1e-3), name
        assert record["cache_numbers_per_token_and_layer"] == {"before": 48, "after": 29}
    found = open_checkpoint(tmp_path / "tp2").architecture.converted
    assert found is not None and (found.layout, found.rank) == ("deepseek", 23)


@pytest.mark.slow
def test_layers_are_fitted_in_order(ranks: RankPool, inputs: Path, tmp_path: Path):
    one = job(inputs, tmp_path / "out", sequential_compensation=True)
    assert ranks(1).run(run, one) == [[0, 1, 2, 3]]
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert record["judgement"]["after"] > 1


def refused(words: list[str], capsys: pytest.CaptureFixture) -> str:
    with pytest.raises(SystemExit) as ended:
        mla_command.main(words, say=lambda _: None)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_what_would_be_saved_is_said_and_nothing_is_written(inputs: Path, tmp_path: Path):
    said: list[str] = []
    words = [str(inputs / "model"), str(tmp_path / "out"), "--to", "mla", "--dry-run"]
    sizes = ["--layout", "paper", "--rope-pairs", "2", "--kv-dims-per-head", "6"]
    mla_command.main([*words, *sizes, "--low-rank-method", "paper-joint"], say=said.append)
    assert said == [
        "cache of a token and layer: 48 numbers -> 20 (41.67%): 8 by KV head, 12 shared"
    ]
    assert not list(tmp_path.iterdir())


def test_a_method_sets_what_no_flag_names():
    words = ["in", "out", "--to", "mla", "--low-rank-method", "transmla", "--moment-ridge", "0.5"]
    _, config, rest = mla_command.parse_command([*words, *TP2])
    assert (config.kv_balance, config.token_weight, config.moment_ridge) == (
        "channel-rms",
        0.0,
        0.5,
    )
    assert rest == list(TP2)


@pytest.mark.parametrize(
    ("flags", "reasons"),
    [
        (["--kv-rank", "4"], ["--kv-rank without --rope-pairs"]),
        (
            ["--rope-pairs", "40", "--cache-ratio", "0.5", "--layout", "paper"],
            ["--rope-pairs 40: a head has 6"],
        ),
        ([], ["give exactly one of --kv-rank"]),
    ],
)
def test_what_does_not_fit_is_said(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture, flags: list, reasons: list
):
    words = [str(inputs / "model"), str(tmp_path / "out"), "--to", "mla", "--dry-run", *flags]
    said = refused(words, capsys)
    assert all(reason in said for reason in reasons), said


def test_files_that_are_missing_are_named_before_the_work(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    words = [str(inputs / "model"), str(tmp_path / "out"), "--to", "mla", "--cache-ratio", "0.5"]
    texts = [str(inputs / "calibration.txt"), "nowhere.txt"]
    said = refused([*words, "--calibration-data", *texts], capsys)
    assert "--calibration-data nowhere.txt is no file" in said
    assert not list(tmp_path.iterdir())


def test_longer_sequences_than_the_checkpoint_has_positions_are_refused(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    words = [str(inputs / "model"), str(tmp_path / "out"), "--to", "mla", "--rope-pairs", "2"]
    words += ["--cache-ratio", "0.6", "--layout", "paper"]
    data = ["--calibration-data", str(inputs / "calibration.txt"), "--calibration-context", "65"]
    with device_mode():
        said = refused([*words, *data], capsys)
    assert "--calibration-context 65: the checkpoint is made for 64 positions" in said
    assert not list(tmp_path.iterdir())
