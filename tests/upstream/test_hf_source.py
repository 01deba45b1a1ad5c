"""What --hf-model refuses is refused after conversion too, wherever the checkpoint is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.options.ranges import BadOptions
from megatron_ext.upstream.checkpoint import Progress, save
from megatron_ext.upstream.convert import to_megatron
from megatron_ext.upstream.convert_hf import to_hf
from megatron_ext.upstream.convert_target import HF_FOLDER
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.evaluate import parse_for_evaluation
from megatron_ext.upstream.generate import usual_context
from megatron_ext.upstream.hf_source import read_record, stop_ids_of_record, tokenizer_folder
from tests.ranks import RankPool
from tests.upstream.jobs import build
from tests.weights.folders import CONFIG, write_folder
from tests.weights.tiny_models import BASE, LATENT, YARN

WINDOW = {"model_type": "mistral", "sliding_window": 16}
NULL = ["--tokenizer-type", "NullTokenizer"]


def converted(root: Path, changed: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Flags of a checkpoint in Hugging Face's layout, and of the same converted."""
    write_folder(root / "hf", config=CONFIG | {"vocab_size": 300} | changed)
    with device_mode():
        to_megatron(root / "hf", root / "megatron", implementation="local").run(lambda _: None)
    return ["--hf-model", str(root / "hf")], ["--load", str(root / "megatron")]


def refused(words: list[str], **options: int) -> str:
    with pytest.raises(BadOptions) as caught:
        parse_for_evaluation([*words, *NULL], **options)
    return str(caught.value)


def test_a_sliding_window_is_refused_after_conversion(tmp_path: Path):
    """N9: as --hf-model refuses it; and nothing is said to be missing that follows from it."""
    of_hf, of_megatron = converted(tmp_path, WINDOW)
    before, after = (refused(words, seq_length=17) for words in (of_hf, of_megatron))
    assert "sliding_window 16: sliding windows are not built" in after
    assert after.replace(" ".join(of_megatron), "") == before.replace(" ".join(of_hf), "")
    assert [usual_context(words) for words in (of_hf, of_megatron)] == [16, 16]


@pytest.mark.parametrize(
    "changed",
    [
        WINDOW,
        {"rope_parameters": YARN | {"beta_fast": 16.0}, "eos_token_id": [7, 8]},
        {
            **BASE,
            **LATENT,
            "model_type": "deepseek_v3",
            "n_routed_experts": 8,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
            "vocab_size": 300,
        },
    ],
    ids=["window", "yarn", "deepseek"],
)
def test_a_converted_checkpoint_needs_no_flags_of_its_model(
    tmp_path: Path, changed: dict[str, Any]
):
    """N9: also values that have no flag in Megatron, such as yarn's of latent attention."""
    of_hf, of_megatron = converted(tmp_path, changed)
    before, after = (
        vars(parse_for_evaluation([*words, *NULL], seq_length=16).megatron)
        for words in (of_hf, of_megatron)
    )
    names = before.keys() - {"hf_model", "load"}
    assert {n: before[n] for n in names} == {n: after[n] for n in names}
    assert after["hf_record"]["stop_ids"] == changed.get("eos_token_id", [])


def test_stop_ids_and_tokenizer_come_with_it(tmp_path: Path):
    """N9"""
    _, words = converted(tmp_path, {"eos_token_id": [7, 8]})
    args = parse_for_evaluation([*words, *NULL], seq_length=16).megatron
    assert stop_ids_of_record(args) == {7, 8}
    assert tokenizer_folder(args) is None
    kept = tmp_path / "megatron" / HF_FOLDER
    (kept / "tokenizer.json").write_text("{}")
    assert tokenizer_folder(args) == str(kept)


def test_flags_and_models_that_contradict_it_are_refused(tmp_path: Path):
    """N9"""
    _, words = converted(tmp_path, {"rope_theta": 5e5})
    text = refused([*words, "--rotary-base", "10000"], seq_length=16)
    assert "--rotary-base 10000 contradicts the checkpoint, whose rotary_base is 500000" in text
    write_folder(tmp_path / "other", config=CONFIG | {"vocab_size": 300})
    text = refused([*words, "--hf-model", str(tmp_path / "other")], seq_length=16)
    assert "has rotary_base 10000, --load" in text
    assert "was made from a model with 500000: drop one of the two flags" in text


def test_the_way_back_without_the_kept_folder(tmp_path: Path):
    """N9: the config.json comes out of the checkpoint itself."""
    converted(tmp_path, WINDOW)
    for file in (tmp_path / "megatron" / HF_FOLDER).iterdir():
        file.unlink()
    to_hf(tmp_path / "megatron", tmp_path / "back").run(lambda _: None)
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (back["model_type"], back["sliding_window"]) == ("mistral", 16)


def save_a_run(start: list[str], target: Path) -> dict[str, Any]:
    """What the checkpoint of a run carries, whatever it began with."""
    flags = ["--seq-length", "16", "--train-iters", "1", "--lr", "1", "--global-batch-size", "1"]
    with device_mode():
        options, layout, model, _ = build([*flags, *NULL, *start, "--save", str(target)])
        save(options.megatron, model, layout, progress=Progress(step=1, consumed_samples=1))
    return dict(read_record(target / "iter_0000001") or {})


@pytest.mark.slow
def test_runs_hand_it_on(ranks: RankPool, tmp_path: Path):
    """N9: from a checkpoint to the run that starts with it, to the next, and to a resumed one."""
    config = CONFIG | WINDOW | {"vocab_size": 300, "eos_token_id": 7}
    write_folder(tmp_path / "hf", config=config)
    first, second = tmp_path / "first", tmp_path / "second"
    record = {"config": config, "stop_ids": [7]}
    assert ranks(1).run(save_a_run, ["--hf-model", str(tmp_path / "hf")], first) == [record]
    assert ranks(1).run(save_a_run, ["--load", str(first), "--finetune"], second) == [record]
    words = ["--load", str(second), "--save", str(second)]
    assert "sliding_window 16" in refused(words, seq_length=17)
    assert parse_for_evaluation([*words, *NULL], seq_length=16).megatron.hf_record == record
