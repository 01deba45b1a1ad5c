"""The self-check passes for a sound checkpoint on its layout, and fails for a changed one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from safetensors.torch import load_file, save_file

from megatron_ext.upstream import self_check
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.evaluate import parse_for_evaluation
from megatron_ext.upstream.self_check import LINES, Line, run_checks
from megatron_ext.upstream.self_check_setup import Setup, judged, open_setup, skipped
from megatron_ext.upstream.self_check_update import largest_difference, write_update
from tests.marks import slow_except
from tests.ranks import ROOT, RankPool
from tests.weights.tiny_models import MODELS, save
from tools.self_check import summary, table_row

TRANSFORMERS = "log-probs equal transformers'"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("self-check") / "llama"
    save(MODELS["llama"], path)
    return path


def opened(model: Path, *, reference: Path | None, scratch: Path, flags: str = "") -> Setup:
    """The set-up of a checkpoint; call it inside ``device_mode()``."""
    words = ["--hf-model", str(model), "--tokenizer-type", "NullTokenizer", *flags.split()]
    options = parse_for_evaluation(words, seq_length=48)
    tool = [str(ROOT / "tools/self_check.py"), "--hf-model", str(model), "--seq-length", "48"]
    return open_setup(
        options, reference=reference, scratch_dir=scratch, words=[*tool, *flags.split()]
    )


LAYOUTS = {
    "one rank": (1, ""),
    "tp2 sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2 vpp2": (
        2,
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    ),
}


def checked(model: Path, reference: Path, scratch: Path, flags: str) -> list[Line]:
    left_out = () if "--sequence-parallel" in flags else (self_check.update_is_single_process,)
    with device_mode():
        setup = opened(model, reference=reference, scratch=scratch, flags=flags)
        return list(run_checks(setup, leave_out=left_out))


@pytest.mark.parametrize("layout", slow_except({"one rank"}, LAYOUTS))
def test_sound_checkpoint_passes(ranks: RankPool, folder: Path, tmp_path: Path, layout: str):
    size, flags = LAYOUTS[layout]
    results = ranks(size).run(checked, folder, folder, tmp_path, flags, timeout=110)
    for lines in results:
        assert lines == results[0]
        assert len(lines) == len(LINES) - (layout != "tp2 sp")
        assert [line for line in lines if line.status == "FAIL"] == []
        alone = {"all replicas agree"} if layout == "one rank" else set()
        assert {line.name for line in lines if line.status == "skipped"} == alone
        for line in lines:
            assert (line.number == "-") == (line.status == "skipped")
            row = table_row(line)
            assert row.startswith(line.status)
            assert (line.advice in row) == (line.status == "skipped")


def skipped_lines(model: Path, scratch: Path) -> list[Line]:
    """Of a set-up in which nothing can be compared, sampled or masked."""
    with device_mode():
        setup = opened(model, reference=None, scratch=scratch)
        args = setup.options.megatron
        args.context_parallel_size, args.padded_vocab_size = 2, args.vocab_size
        checks = (
            self_check.against_transformers,
            self_check.replicas_agree,
            self_check.padding_is_masked,
            self_check.sampler_is_trainer,
            self_check.update_is_single_process,
        )
        return [check(setup) for check in checks]


@pytest.mark.slow
def test_d3_a_check_that_was_not_made_is_skipped_with_its_reason(
    ranks: RankPool, folder: Path, tmp_path: Path
):
    (lines,) = ranks(1).run(skipped_lines, folder, tmp_path, timeout=110)
    reasons = (
        "there is nothing to compare with: give --reference DIR",
        "there is one rank, so nothing to compare",
        "the vocabulary has no padding on this layout",
        "the model cannot sample: --context-parallel-size 2: decoding needs whole sequences",
        "this is one process",
    )
    for line, reason in zip(lines, reasons, strict=True):
        assert (line.status, line.passed, line.number) == ("skipped", False, "-")
        row = table_row(line)
        assert row.startswith(f"skipped  {line.name}") and reason in row
    assert summary(lines) == "0 pass, 0 FAIL, 5 skipped"


def test_d3_rows_say_what_became_of_a_check():
    fine = judged("name", passed=True, number="max 1", advice="mend it")
    bad = judged("name", passed=False, number="max 9", advice="mend it")
    assert table_row(fine).split() == ["pass", "name", "max", "1"]
    assert table_row(bad).split() == ["FAIL", "name", "max", "9", "mend", "it"]
    assert table_row(skipped("name", reason="no")).split() == ["skipped", "name", "-", "no"]
    assert summary([fine, bad, fine]) == "2 pass, 1 FAIL, 0 skipped"


def change_rope_base(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 50_000.0
    (folder / "config.json").write_text(json.dumps(config))


def change_one_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][0] *= 1.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def first_line(models: list[Path], reference: Path, scratch: Path) -> list[Line]:
    """The comparison with transformers for each checkpoint, all of one architecture."""
    lines = []
    with device_mode():
        for model in models:
            setup = opened(model, reference=reference, scratch=scratch)
            lines.append(self_check.against_transformers(setup))
    return lines


@pytest.mark.parametrize(
    "change", [change_rope_base, pytest.param(change_one_weight, marks=pytest.mark.slow)]
)
def test_changed_checkpoint_fails(
    ranks: RankPool, folder: Path, tmp_path: Path, change: Callable[[Path], None]
):
    changed = tmp_path / "changed"
    shutil.copytree(folder, changed)
    change(changed)
    ((line,),) = ranks(1).run(first_line, [changed], folder, tmp_path, timeout=110)
    assert line.name == TRANSFORMERS and not line.passed
    assert "FAIL" in table_row(line) and "rope_theta" in table_row(line)


def hear_padding(setup: Setup) -> Line:
    """The vocabulary is taken to be as large as with its padding."""
    vars(setup.stepper)["vocab_size"] = setup.options.megatron.padded_vocab_size
    return self_check.padding_is_masked(setup)


def lose_a_weight(setup: Setup) -> Line:
    """A weight that no checkpoint holds."""
    model: Any = setup.stepper.model.bare_chunks[0]
    weight = model.decoder.final_layernorm.weight
    whole = GPTModel.sharded_state_dict

    def without_final_norm(self: GPTModel, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = whole(self, *args, **kwargs)
        return {key: value for key, value in state.items() if "final_layernorm" not in key}

    model.sharded_state_dict = without_final_norm.__get__(model)
    load = model.load_state_dict
    model.load_state_dict = lambda state, strict: load(state, strict=False)
    assert weight.abs().min() > 0
    return self_check.checkpoint_round_trip(setup)


def broken_lines(model: Path, scratch: Path) -> list[Line]:
    with device_mode():
        setup = opened(model, reference=None, scratch=scratch)
        before = [p.clone() for p in setup.stepper.model.chunks[0].parameters()]
        lines = [lose_a_weight(setup), hear_padding(setup)]
        after = setup.stepper.model.chunks[0].parameters()
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return lines


@pytest.mark.slow
def test_broken_round_trip_and_mask_fail(ranks: RankPool, folder: Path, tmp_path: Path):
    ((round_trip, mask),) = ranks(1).run(broken_lines, folder, tmp_path)
    assert not round_trip.passed and round_trip.number.startswith("1 of")
    assert not mask.passed


def write_single(model: Path, scratch: Path, folder: Path) -> None:
    """What the second run of the tool does, in the pool."""
    with device_mode():
        write_update(opened(model, reference=None, scratch=scratch), folder=folder)


def difference(model: Path, scratch: Path, single: Path, flags: str, forget: bool) -> float:
    """Of an update on this layout from a single process's; the model is then as before.

    forget: gradients of the norms stay those of this rank's positions, as if nobody summed them.
    """
    with device_mode():
        setup = opened(model, reference=None, scratch=scratch, flags=flags)
        parameters = [p for chunk in setup.stepper.model.chunks for p in chunk.parameters()]
        before = [p.clone() for p in parameters]
        if forget:
            for parameter in parameters:
                vars(parameter)["sequence_parallel"] = False
        found = largest_difference(setup, single)
        assert all(map(torch.equal, before, parameters))
        return found


@pytest.mark.slow
def test_an_update_is_that_of_one_process(ranks: RankPool, folder: Path, tmp_path: Path):
    """`test_sound_checkpoint_passes` has the tool's own second process."""
    single, (_, sequence_parallel) = tmp_path / "single", LAYOUTS["tp2 sp"]
    ranks(1).run(write_single, folder, tmp_path, single)
    for flags in (LAYOUTS["pp2 vpp2"][1], "--use-distributed-optimizer --overlap-grad-reduce"):
        found = ranks(2).run(difference, folder, tmp_path, single, flags, False, timeout=110)
        assert max(found) < 1e-4, flags
    found = ranks(2).run(difference, folder, tmp_path, single, sequence_parallel, True)
    assert min(found) > 0.01
