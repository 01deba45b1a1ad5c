"""Options of reinforcement learning: presets are defaults, and what does not fit is refused."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from shlex import split

import pytest

from megatron_ext.environments.arithmetic_tasks import TOKENIZER
from megatron_ext.rl.presets import PRESETS
from megatron_ext.upstream.arguments import parse

MODEL = split(
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 64 --train-iters 2 "
    "--lr 1e-3 --global-batch-size 16 --attention-dropout 0 --hidden-dropout 0"
)


def refusal(capsys: pytest.CaptureFixture, *flags: str) -> str:
    """The message of a refused command line."""
    with pytest.raises(SystemExit) as exit:
        parse([*MODEL, *flags])
    assert exit.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_named_alone(name: str) -> None:
    options = parse([*MODEL, "--algorithm", name])
    values = dict(PRESETS[name])
    assert options.packing.loss_normalization == values.pop("loss_normalization")
    assert {k: getattr(options.algorithm, k) for k in values} == values
    assert options.megatron.vocab_size == TOKENIZER.size


def test_a_flag_wins_over_the_preset_wherever_it_stands() -> None:
    for words in (
        "--clip-high 0.5 --algorithm grpo-plus --loss-normalization sample-mean",
        "--loss-normalization sample-mean --algorithm=grpo-plus --clip-high=0.5",
    ):
        options = parse([*MODEL, *words.split()])
        assert options.algorithm.clip_high == 0.5
        assert options.packing.loss_normalization == "sample-mean"
        assert options.algorithm.overlong_episodes == "mask"
    assert parse([*MODEL, "--algorithm", "decoupled-ppo"]).algorithm.sampler_correction_cap == inf


def test_a_constant_length_is_the_longest_response_unless_named() -> None:
    flags = ["--algorithm", "dr-grpo", "--rollout-max-new-tokens", "33"]
    assert parse([*MODEL, *flags]).packing.loss_normalization_max_length == 33
    flags += ["--loss-normalization-max-length", "50"]
    assert parse([*MODEL, *flags]).packing.loss_normalization_max_length == 50


def test_temperature_is_the_samplers_only_where_there_is_a_sampler() -> None:
    flags = ["--rollout-temperature", "0.5"]
    assert parse([*MODEL, *flags, "--algorithm", "grpo"]).training_temperature == 0.5
    assert parse([*MODEL, *flags]).training_temperature == 1.0


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--algorithm grpo --group-size 1", "--group-size 1"),
        ("--algorithm grpo --group-size 3", "--global-batch-size 16"),
        ("--algorithm grpo --rollout-temperature 0", "--rollout-temperature 0"),
        ("--algorithm grpo --rollout-top-p 0.9", "--rollout-top-p 0.9 is for evaluation only"),
        ("--algorithm grpo --hidden-dropout 0.1", "--hidden-dropout 0.1"),
        ("--algorithm grpo --train-data a.txt", "--train-data"),
        ("--algorithm rloo --minibatches 2", "--policy-loss likelihood"),
        ("--algorithm grpo --kl-estimator k1", "--kl-estimator k1"),
        ("--algorithm grpo --tasks t.jsonl --eval-every 1", "--eval-tasks"),
        ("--algorithm grpo --math-workers 0", "--math-workers 0"),
        ("--algorithm grpo --max-turns -1", "--max-turns -1"),
        ("--algorithm sft --clip-high 0.3", "--clip-high"),
        ("--algorithm no-such", "no-such"),
    ],
)
def test_what_makes_no_sense_is_refused(
    capsys: pytest.CaptureFixture, flags: str, named: str
) -> None:
    assert named in refusal(capsys, *flags.split())


def test_all_mismatches_come_at_once(capsys: pytest.CaptureFixture) -> None:
    found = refusal(
        capsys,
        *split("--algorithm grpo --group-size 1 --rollout-top-k 5 --minibatches 0 --dual-clip 0.5"),
    )
    for named in ("--group-size 1", "--rollout-top-k 5", "--minibatches 0", "--dual-clip 0.5"):
        assert named in found


def test_demonstrations_have_the_vocabulary_of_the_tasks(tmp_path: Path) -> None:
    rows = ["--seq-length", "160", "--max-position-embeddings", "160"]
    options = parse([*MODEL, *rows, "--train-data", "arithmetic-demonstrations"])
    assert options.megatron.vocab_size == TOKENIZER.size
    file = tmp_path / "t.jsonl"
    file.write_text(json.dumps({"text": "abc"}))
    assert parse([*MODEL, "--train-data", str(file)]).megatron.vocab_size > TOKENIZER.size
