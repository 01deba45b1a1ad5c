"""Every option with every kind of bad value: refused by its own flag, or a run that is right."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from pathlib import Path

import pytest

from megatron_ext.options.first_look import first_problems
from megatron_ext.options.megatron_ranges import FLAGS, FRACTIONS, INTEGERS
from megatron_ext.upstream.arguments import RANGES, build_parser, parse
from megatron_ext.upstream.cpu import device_mode
from tests.ranks import RankPool
from tests.upstream import option_jobs
from tests.upstream.cpu_runs import SMALL

BIG = 10**20
INTEGER_VALUES = ("0", "-1", "nan", "inf", "1e308", str(BIG), str(2**31), "three", "1e3", "1.5")
FRACTION_VALUES = ("0", "-1", "nan", "inf", "-inf", "1e308", "-1e308", "1e-320", "three")
TEXT_VALUES = ("", "x", "-1", "nan", "[", "(1", "/proc/x", "/dev/null")
ACTIONS = [a for a in build_parser()._actions if a.dest != "help"]
NUMBERS = [a for a in ACTIONS if a.dest in RANGES and a.nargs != 0]


def refusal(words: list[str]) -> list[str] | None:
    """The sentences that refuse a command line; None = it is accepted."""
    said = io.StringIO()
    try:
        with device_mode(), contextlib.redirect_stderr(said):
            parse(words)
    except SystemExit as stop:
        assert stop.code == 2, words
        usage, first, *lines = said.getvalue().splitlines()
        assert usage.startswith("usage: torchrun")
        program, _, message = first.partition(": error: ")
        assert program == "pretrain_rl.py"
        assert bool(message) != bool(lines), "one message"
        return [line.strip() for line in lines or [message]]
    return None


def names(sentence: str, flag: str) -> bool:
    """Whether a sentence is about a flag, not one whose name begins like it."""
    return re.search(rf"{re.escape(flag)}(?![\w-])", sentence) is not None


def base_of(action: argparse.Action) -> list[str]:
    """A command line on which an option has an effect."""
    words = SMALL.split()
    if re.search("moe|expert", action.dest):
        words += ["--num-experts", "4", "--moe-router-topk", "2"]
    if re.search("lora_rank|qk_head|qk_pos|v_head|mscale|rotary_scaling", action.dest):
        words += ["--multi-latent-attention"]
    return words


R9 = {
    "--lr": "inf nan -1 -inf -1e-3 1e308",
    "--min-lr": "nan -1 inf",
    "--weight-decay": "nan -1 inf",
    "--init-method-std": "nan -1 inf",
    "--adam-eps": "0 nan -1e-8 1e-320 inf",
    "--adam-beta1": "1 nan -0.1",
    "--clip-grad": "nan inf -1",
    "--norm-epsilon": "-1 0 nan",
    "--rotary-base": f"0 -1 {BIG} 1e4",
    "--rotary-percent": "0 1.5 nan",
    "--seed": "-1 0 1099511627776 2147483648",
    "--global-batch-size": f"{BIG} 0 -4",
    "--micro-batch-size": f"{BIG} 0",
    "--train-iters": f"{BIG} 0 three",
    "--seq-length": f"{BIG} 0 -1",
    "--hidden-dropout": "1 nan -1",
    "--attention-dropout": "1 nan",
    "--eval-interval": f"0 {BIG}",
    "--distributed-timeout-minutes": f"0 {BIG}",
    "--moe-aux-loss-coeff": "nan -1 inf",
    "--moe-z-loss-coeff": "nan -1",
    "--loss-scale": "0 nan",
    "--logprob-chunk-size": f"-1 {BIG}",
    "--rollout-temperature": "-1 nan inf 1e-320",
    "--clip-high": "nan -1 -inf",
    "--kl-coefficient": "nan inf -1",
    "--environment-time-limit": "0 nan inf 1e308",
    "--math-workers": f"0 {BIG}",
    "--progress-interval-seconds": "nan inf -1 1e308",
    "--task-seed": f"{BIG} nan",
    "--keep-checkpoints": f"-1 {BIG}",
    "--overlong": "trunc",
    "--algorithm": "grpoo",
    "--normalization": "rmsnorm",
    "--hf-model": "/nope",
    "--save": "/proc/x /dev/null /dev/null/x /sys/x",
    "--output-dir": "/proc/x /dev/null /dev/null/x",
    "--train-data": "/tmp /nope.txt /nope",
    "--tokenizer-model": "/nope",
    "--wandb-project": "p",
}


@pytest.mark.parametrize("flag", R9)
def test_r9_a_bad_value_is_refused_in_one_sentence_by_its_flag(flag: str):
    for value in R9[flag].split():
        for words in ([f"{flag}={value}"], [flag, value]):
            (sentence,) = refusal([*SMALL.split(), *words]) or ["accepted"]
            assert sentence.startswith(flag), (words, sentence)
            assert names(sentence, flag)
            assert value in sentence or re.search(r"\d|nan|inf", sentence)


def test_r9_rows_that_are_shorter_than_a_demonstration_are_refused():
    words = [*option_jobs.BYTES.split(), "--train-data", "arithmetic-demonstrations"]
    (short,) = refusal([*words, "--seq-length", "150"]) or ["accepted"]
    assert "--seq-length 150 is shorter than the longest" in short
    packed = ["--seq-length", "151", "--packing", "--max-tokens-per-microbatch"]
    (short,) = refusal([*words, *packed, "99"]) or ["accepted"]
    assert "--max-tokens-per-microbatch 99 is shorter" in short
    assert refusal([*words, "--seq-length", "151"]) is None
    assert refusal([*words, "--seq-length", "20", "--overlong", "truncate"]) is None


def test_r9_what_a_model_that_does_not_exist_would_have_set_is_not_called_missing():
    words = ["--hf-model", "/nope", "--seq-length", "8", "--train-iters", "1", "--lr", "1"]
    (sentence,) = refusal(words) or ["accepted"]
    assert sentence.startswith("--hf-model /nope does not exist")


def test_what_follows_from_a_bad_value_is_not_told_and_what_does_not_is():
    words = ["--lr", "nan", "--min-lr", "1e-5", "--sequence-parallel"]
    words += ["--max-position-embeddings", "8"]
    flags = [sentence.split()[0] for sentence in refusal([*SMALL.split(), *words]) or []]
    assert sorted(flags) == ["--lr", "--max-position-embeddings", "--sequence-parallel"]


def test_a_number_outside_its_range_has_one_sentence_that_begins_with_its_flag():
    for action in NUMBERS:
        flag, kind = action.option_strings[0], action.type
        for value in ("nan", str(BIG) if kind is int else "1e308"):
            (sentence,) = refusal([*base_of(action), f"{flag}={value}"]) or ["accepted"]
            assert sentence.startswith(f"{flag} ") or f" {flag} " in sentence, sentence


def test_megatrons_ranges_have_the_flags_and_kinds_of_its_parser():
    flags = {a.dest: a.option_strings[0] for a in ACTIONS}
    kinds = {a.dest: a.type for a in ACTIONS}
    for kind, ranges in ((int, INTEGERS), (float, FRACTIONS)):
        for name in ranges:
            assert kinds[name] is kind, name
            assert flags[name] == FLAGS.get(name, f"--{name.replace('_', '-')}")
    for action in NUMBERS:
        default = action.default
        assert default is None or all(
            value in RANGES[action.dest]
            for value in (default if isinstance(default, list) else [default])
        ), action.dest


def test_the_legal_values_are_in_the_help():
    [action] = [a for a in ACTIONS if a.dest == "adam_beta2"]
    assert "Legal: at least 0 and below 1." in (action.help or "")


def test_the_first_look_refuses_only_what_is_refused_later():
    words = [f"{flag}={value}" for flag in R9 for value in R9[flag].split()]
    seen = [word for word in words if first_problems([word])]
    assert len(seen) > 60
    for word in seen:
        assert all(sentence.startswith(word.split("=")[0]) for sentence in first_problems([word]))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_option_takes_a_bad_value_or_blames_another_flag():
    wrong = []
    for action in ACTIONS:
        if action.nargs == 0:
            continue
        values = {int: INTEGER_VALUES, float: FRACTION_VALUES}.get(action.type, TEXT_VALUES)
        flag = action.option_strings[0]
        for value in ("mispelled", "") if action.choices else values:
            sentences = refusal([*base_of(action), f"{flag}={value}"])
            if sentences is None and action.dest in RANGES and action.type is not None:
                number = action.type(value)  # type: ignore[operator]
                wrong += [] if number in RANGES[action.dest] else [f"{flag} {value} is accepted"]
            elif sentences is not None and not any(names(s, flag) for s in sentences):
                wrong.append(f"{flag} {value}: {sentences}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_a_misspelled_flag_is_refused_with_the_right_one_among_the_suggestions():
    parser, missed = build_parser(), []
    for action in ACTIONS[::4]:  # looking for one takes 20 ms
        flag = action.option_strings[0]
        if len(flag) < 10:
            continue
        middle = len(flag) // 2
        word = flag[:middle] + flag[middle + 1 :]
        _, _, (sentence,) = parser.read([word])
        missed += [] if names(sentence, flag) else [sentence]
    assert len(missed) < len(ACTIONS) / 200, missed  # a shorter flag can be nearer


@pytest.mark.slow
def test_every_number_that_a_run_reads_has_a_range(ranks: RankPool, tmp_path: Path):
    read: set[str] = set()
    for flags in option_jobs.runs_to_record(tmp_path).values():
        read |= ranks(1).run(option_jobs.recorded_reads, flags, timeout=100)[0]
    numbers = {a.dest for a in ACTIONS if a.type in (int, float) and not a.choices}
    assert {"lr", "seed", "moe_router_topk", "kv_lora_rank", "layernorm_epsilon"} <= read
    assert len(read & numbers) > 120
    assert read & numbers - RANGES.keys() == set()


ACCEPTED = """
--hidden-dropout 0
--attention-dropout 0.999999
--lr 0
--lr 1e-30
--min-lr 1e-3
--clip-grad 0
--clip-grad 1e30
--weight-decay 0
--weight-decay 100
--init-method-std 0
--adam-beta1 0 --adam-beta2 0
--adam-eps 1e-30
--norm-epsilon 1e-30
--norm-epsilon 1e30
--rotary-base 1
--rotary-base 2147483647
--rotary-percent 0.25
--lr-warmup-iters 0
--lr-warmup-fraction 0
--lr-decay-iters 1000000000 --lr-decay-style cosine
--lr-decay-style WSD --lr-wsd-decay-iters 1
--train-iters 1000000000
--logprob-chunk-size 0
--logprob-chunk-size 1
--logprob-chunk-size 2147483647
--balance-attention-weight 1e30
--max-tokens-per-microbatch 2147483647
--packing --max-sequences-per-row 1
--max-position-embeddings 2147483647
--optimizer sgd --sgd-momentum 0
--initial-loss-scale 1 --fp16
--start-weight-decay 0 --end-weight-decay 0 --weight-decay-incr-style linear
--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0
--num-experts 4 --moe-router-topk 4 --moe-aux-loss-coeff 1e3 --moe-z-loss-coeff 0
--num-experts 1 --moe-router-topk 1 --moe-router-pre-softmax
--num-experts 4 --moe-router-topk 2 --moe-expert-capacity-factor 1e-3
--distributed-timeout-minutes 10000000
"""


@pytest.mark.slow
def test_what_is_accepted_at_the_ends_of_ranges_trains(ranks: RankPool):
    lines = ACCEPTED.strip().splitlines()
    [failed] = ranks(1).run(option_jobs.steps_that_fail, lines, timeout=110)
    assert failed == {}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2**31 - 1])
def test_the_ends_of_the_seeds_start_a_run(ranks: RankPool, seed: int):
    [failed] = ranks(1).run(option_jobs.steps_that_fail, [f"--seed {seed}"])
    assert failed == {}
