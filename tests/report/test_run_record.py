"""config.json: strict JSON of any option, with versions and command and without secrets."""

from __future__ import annotations

import enum
import json
import math
from pathlib import Path

import torch

import megatron_ext
from megatron_ext.report.run_record import describe_run, json_value, write_run_record


class Backend(enum.Enum):
    FLASH = 1


def describe(options, command=("train.py",)):
    return describe_run(options, world_size=4, total_steps=9, resume_step=3, command=command)


def test_config_json_holds_every_option_and_the_versions(tmp_path):
    options = {"b": 1e-4, "a": None, "c": torch.bfloat16, "d": [1, (2, "x")], "e": math.inf}

    write_run_record(tmp_path / "config.json", describe(options))

    written = json.loads((tmp_path / "config.json").read_text(), parse_constant=None)
    assert written["options"] == {
        "a": None,
        "b": 1e-4,
        "c": "torch.bfloat16",
        "d": [1, [2, "x"]],
        "e": "inf",
    }
    assert list(written["options"]) == ["a", "b", "c", "d", "e"]
    assert written["versions"]["megatron_ext"] == megatron_ext.__version__
    assert written["versions"]["torch"] == torch.__version__.split("+")[0]
    assert (written["world_size"], written["total_steps"], written["resume_step"]) == (4, 9, 3)
    assert written["command"] == "train.py"


def test_values_that_json_lacks_become_text():
    value = {1: {Path("a/b")}, "f": torch.nn.functional.silu, "e": Backend.FLASH, "t": True}
    assert json_value(value) == {"1": ["a/b"], "f": "silu", "e": "Backend.FLASH", "t": True}
    assert json_value(math.nan) == "nan"


def test_secrets_are_not_recorded():
    command = ["t.py", "--judge-api-key", "k3y", "--api-key=k3y", "--eos-token", "</s>"]
    options = {"judge_api_key": "k3y", "hf_token": None, "eos_token": "</s>"}

    record = describe(options, command)

    assert "k3y" not in str(vars(record))
    assert record.options == {"eos_token": "</s>", "hf_token": None, "judge_api_key": "(hidden)"}
    assert record.command == (
        "t.py --judge-api-key '(hidden)' '--api-key=(hidden)' --eos-token '</s>'"
    )


def test_a_command_can_be_pasted_into_a_shell():
    assert describe({}, ["t.py", "--run-title", "two words"]).command.endswith("'two words'")
