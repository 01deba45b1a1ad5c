"""Arguments: declared once, shown beside Megatron's, and refused in one message that helps."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import resource
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import global_vars
from megatron.training.arguments import add_megatron_arguments

from megatron_ext.report.run_record import json_value
from megatron_ext.upstream.arguments import CONFIGS, Options, build_parser, parse
from megatron_ext.upstream.command_line import CommandLine
from megatron_ext.upstream.cpu import device_mode
from tests.ranks import RankPool
from tests.upstream import rl_jobs
from tests.upstream.cpu_runs import SMALL

ROOT = Path(__file__).resolve().parents[2]
UNIT_OR_OFF = r"\d|unset|number|seconds|steps|tokens|positions|sequences|requests|episodes|samples"
OURS = [(group, field) for group, config in CONFIGS.items() for field in fields(config)]


def options_of(flags: str) -> Options:
    """The options of a command line of one rank."""
    with device_mode():
        return parse(flags.split())


def refusal(capsys: pytest.CaptureFixture, flags: str) -> list[str]:
    """The lines of the message that refuses a command line, without the usage."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as raised:
        options_of(flags)
    assert raised.value.code == 2
    usage, first, *lines = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: torchrun")
    assert first == "pretrain_rl.py: error: "
    return [line.strip() for line in lines]


def seconds_of_child(*command: str) -> tuple[float, str]:
    """CPU seconds and standard output of a command."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


@pytest.mark.slow
def test_help_is_quick_and_has_every_option_in_its_group():
    torch_seconds, _ = seconds_of_child("-c", "import torch")
    seconds, text = seconds_of_child("pretrain_rl.py", "--help")
    # On an idle machine torch is imported in less than 2 s; a busy one stretches CPU seconds.
    assert seconds < 10 * max(1.0, torch_seconds / 2)
    sections = re.split(r"^(\S.*):$", text, flags=re.MULTILINE)
    groups = dict(zip(sections[1::2], sections[2::2], strict=True))
    for group, field in OURS:
        assert f"-{field.name.replace('_', '-')}" in groups[f"megatron-ext: {group}"]
    assert text.index("--train-data") < text.index("--num-layers ")
    assert "10%)" in groups["transformer configuration"]  # the percent sign that breaks argparse


@pytest.mark.parametrize(("group", "field"), OURS, ids=lambda value: getattr(value, "name", value))
def test_option_has_a_text_and_a_default_that_changes_nothing(group: str, field):
    [action] = [a for a in build_parser()._actions if a.dest == field.name]
    assert action.help and len(action.help) > 20
    assert build_parser().get_default(field.name) == field.default
    if field.type in (int, float):
        assert re.search(UNIT_OR_OFF, action.help, re.IGNORECASE), "no unit and no off value"


def test_no_option_of_ours_is_one_of_megatrons():
    theirs = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(theirs)
    their_names = {action.dest for action in theirs._actions}
    assert len(their_names) > 700
    names = [field.name for _, field in OURS]
    assert len(names) == len(set(names))
    assert not their_names.intersection(names)
    ours = {o for a in build_parser()._actions if a.dest in names for o in a.option_strings}
    assert not ours.intersection(theirs._option_string_actions)


HELP_TEXTS = {
    "up to 10%": "up to 10%",
    "up to 10%%": "up to 10%",
    "10%) of 5%s": "10%) of 5%s",
    "%(dest)s: 3 % of %(prog)s": "x: 3 % of tool",
}


@pytest.mark.parametrize("text", HELP_TEXTS)
def test_a_percent_sign_in_a_help_text_is_shown(text: str):
    parser = CommandLine(prog="tool")
    parser.add_argument("--x", help=text)
    assert HELP_TEXTS[text] in parser.format_help()


def test_help_shows_defaults_and_what_a_flag_turns_off():
    parser = CommandLine(prog="tool")
    parser.add_argument("--size", type=int, default=7, help="Size in tokens.")
    parser.add_argument("--no-bias", dest="bias", action="store_false", help="Add a bias.")
    text = " ".join(parser.format_help().split())
    assert "Size in tokens. (default: 7)" in text
    assert "Turn off: Add a bias." in text


def test_the_nearest_flags_are_suggested(capsys):
    lines = refusal(
        capsys, f"{SMALL} --num-layer 4 --sequence_parallel --xyzzy=1 --max-tokens-per-micro 8"
    )
    assert len(lines) == 4
    assert "did you mean --num-layers" in lines[0]
    assert "did you mean --sequence-parallel" in lines[1]
    assert "--help lists all" in lines[2]
    assert "did you mean --max-tokens-per-microbatch" in lines[3]


def test_a_value_without_a_flag_is_refused(capsys):
    assert refusal(capsys, f"{SMALL} stray") == ["stray: a value without a flag."]


def test_all_values_that_cannot_be_read_are_in_one_message(capsys):
    lines = refusal(
        capsys,
        f"{SMALL} --seed x --attention-backend flas --moe-layer-freq [ --text-unit page --lrr 1",
    )
    assert len(lines) == 5
    assert lines[0] == "--seed x: invalid int value: 'x'."
    assert lines[1].startswith("--attention-backend flas: this value cannot be used: choose from")
    assert lines[2].startswith("--moe-layer-freq [: this value cannot be used")
    assert "--text-unit page: invalid choice" in lines[3]
    assert lines[4].startswith("--lrr: there is no such option; did you mean --lr")


def test_five_mismatches_are_in_one_message(capsys):
    lines = refusal(
        capsys,
        f"{SMALL} --hidden-size 30 --sequence-parallel --clip-grad -1 --keep-checkpoints -2 "
        "--max-position-embeddings 8 --logprob-chunk-size -4",
    )
    flags = ("hidden-size 30", "sequence-parallel", "clip-grad -1", "keep-checkpoints -2")
    flags += ("max-position-embeddings 8", "logprob-chunk-size -4")
    assert len(lines) == 6
    assert all(any(f"--{flag}" in line for line in lines) for flag in flags)


def test_what_only_megatron_refuses_is_one_line_with_flags(capsys):
    lines = refusal(
        capsys, f"{SMALL} --num-experts 4 --moe-pad-expert-input-to-capacity --moe-router-topk 2"
    )
    assert lines == [
        "Megatron refuses these options: --moe-expert-capacity-factor must be set to use "
        "--moe-pad-expert-input-to-capacity (ValueError)."
    ]


def test_other_ranks_are_quiet(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for flags in (f"{SMALL} --num-layer 4", f"{SMALL} --seed x", f"{SMALL} --clip-grad -1"):
        with pytest.raises(SystemExit) as raised:
            options_of(flags)
        assert raised.value.code == 2
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_ranks_show_the_message_once(ranks: RankPool):
    said = ranks(2).run(rl_jobs.refusal, [*SMALL.split(), "--clip-grad", "-1"])
    assert [text.count("--clip-grad -1.0 must be at least 0") for text in said] == [1, 0]


def test_a_process_can_parse_again():
    first = options_of(f"{SMALL} --global-batch-size 8")
    assert get_num_microbatches() == 8
    second = options_of(f"{SMALL} --micro-batch-size 2 --packing")
    assert get_num_microbatches() == 2
    assert global_vars.get_args() is second.megatron
    assert (first.packing.packing, second.packing.packing) == (False, True)
    lists = [n for n, value in vars(second.megatron).items() if isinstance(value, list) and value]
    assert lists
    shared = [n for n in lists if getattr(first.megatron, n, None) is getattr(second.megatron, n)]
    assert not shared


def test_what_follows_from_other_values_is_filled_in():
    args = options_of(f"{SMALL} --save some/folder").megatron
    assert (args.max_position_embeddings, args.save_interval) == (24, 3)
    assert (args.vocab_size, args.padded_vocab_size) == (250, 256)
    assert options_of(SMALL.replace("--global-batch-size 4", "")).megatron.global_batch_size == 1
    of_bytes = SMALL.replace("--vocab-size 250 --tokenizer-type NullTokenizer", "")
    assert options_of(of_bytes).megatron.vocab_size == 257


def test_megatrons_own_writers_stay_off(tmp_path: Path):
    to = f"--save {tmp_path} --output-dir {tmp_path}"
    options_of(f"{SMALL} --wandb-project p --wandb-exp-name e {to}")
    assert global_vars.get_wandb_writer() is None
    assert not list(tmp_path.iterdir())


def test_options_without_effect_are_named(caplog):
    options_of(f"{SMALL} --log-interval 5 --profile --eval-iters 0")
    [record] = [r for r in caplog.records if r.name == "megatron_ext.upstream.arguments"]
    assert record.getMessage().endswith("no effect here: --log-interval, --profile, --eval-iters")


def test_the_record_has_every_option_as_json():
    options = options_of(f"{SMALL} --bf16 --logprob-chunk-size 7")
    record = options.as_record()
    for group, field in OURS:
        assert record[field.name] == getattr(getattr(options, group), field.name)
    known = {a.dest for a in build_parser()._actions if hasattr(options.megatron, a.dest)}
    assert known <= record.keys()
    text = json.dumps({name: json_value(value) for name, value in record.items()}, allow_nan=False)
    assert json.loads(text)["params_dtype"] == "torch.bfloat16"


def test_options_has_a_field_for_every_config():
    assert [*inspect.signature(Options).parameters] == ["megatron", *CONFIGS]
