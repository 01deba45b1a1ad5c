"""tau-bench trials become chats: every message once, rewards beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_ext.data.config import DataConfig
from megatron_ext.data.dataset import read_dataset
from megatron_ext.data.tau_bench import chats_of_trials, split_by_task
from megatron_ext.data.tokenizer import ByteTokenizer
from tools.convert_dialogues import main

REAL = Path(__file__).parents[3] / "shared" / "data" / "tau_bench_airline.json"
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
TRIAL = {
    "task_id": 3,
    "trial": 1,
    "reward": 1.0,
    "info": {"secret": True},
    "traj": [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
        {"role": "tool", "content": "done", "tool_call_id": "c1", "name": "f"},
        {"role": "assistant", "content": "It is done."},
        {"role": "user", "content": "###STOP###"},
    ],
}
BAD_CALL = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": '}]}
"""CASES N12."""
FAILED = {**TRIAL, "task_id": 4, "reward": 0.0}


def test_a_trial() -> None:
    [chat] = chats_of_trials([TRIAL])
    call = {**CALL, "function": {"name": "f", "arguments": {"a": 1}}}
    assert chat == {
        "messages": [
            *TRIAL["traj"][:2],
            {"role": "assistant", "content": None, "tool_calls": [call]},
            *TRIAL["traj"][3:],
        ],
        "task_id": 3,
        "trial": 1,
        "reward": 1.0,
    }


def test_n13_thoughts_are_kept() -> None:
    """CASES N13: what an agent thought is trained or refused, not lost on the way."""
    said = {"role": "assistant", "content": "a", "reasoning_content": "b", "thinking": None}
    [chat] = chats_of_trials([{**TRIAL, "traj": [said]}])
    assert chat["messages"] == [{"role": "assistant", "content": "a", "reasoning_content": "b"}]


def test_n11_a_result_file_with_half_a_character_is_refused(tmp_path: Path, capsys) -> None:
    """CASES N11: json.dumps writes the half as an escape, which nobody could read again."""
    source = tmp_path / "in.json"
    said = {"role": "assistant", "content": "\ud800"}
    source.write_text(json.dumps([{**TRIAL, "traj": [said]}]))
    with pytest.raises(SystemExit):
        main([str(source), str(tmp_path / "out.jsonl")])
    assert "in.json: has half of a surrogate pair" in capsys.readouterr().err


def test_only_successes() -> None:
    assert len(chats_of_trials([TRIAL, FAILED])) == 2
    assert [c["task_id"] for c in chats_of_trials([TRIAL, FAILED], min_reward=1)] == [3]


def test_a_task_is_held_out_with_all_its_trials() -> None:
    chats = [{"task_id": task} for task in (5, 6, 7, 8, 5, 6, 7, 8)]
    train, valid = split_by_task(chats, every=2)
    assert [c["task_id"] for c in train] == [5, 7, 5, 7]
    assert [c["task_id"] for c in valid] == [6, 8, 6, 8]


@pytest.mark.parametrize(
    ("trials", "problem"),
    [
        ({}, "holds a list of trials"),
        ([TRIAL, 1], "trial 1 is not an object"),
        ([{"traj": []}], "trial 0 has no task_id, reward"),
        ([{**TRIAL, "reward": "1"}], "trial 0 has a reward that is not a number"),
        ([{**TRIAL, "traj": []}], "trial 0 has no messages in traj"),
        ([{**TRIAL, "traj": [{}]}], "trial 0 has messages without a role"),
        ([{**TRIAL, "task_id": [1]}], "trial 0 has a task_id that is neither"),
        ([TRIAL, {**TRIAL, "traj": [BAD_CALL]}], r"trial 1 is bad: traj\[0\]\.tool_calls\[0\] has"),
    ],
)
def test_another_file_is_refused(trials: object, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        chats_of_trials(trials)


def test_the_tool_writes_what_can_be_trained(tmp_path: Path, capsys) -> None:
    source, train, valid = (tmp_path / name for name in ("in.json", "t.jsonl", "v.jsonl"))
    source.write_text(json.dumps([TRIAL, FAILED]))
    main([str(source), str(train), "--valid-output", str(valid), "--valid-every", "2"])
    assert capsys.readouterr().out.splitlines() == [
        f"{train}: 1 dialogues, mean reward 1.000",
        f"{valid}: 1 dialogues, mean reward 0.000",
    ]
    read = read_dataset(str(train), ByteTokenizer(), DataConfig(), seq_length=8, vocab_size=257)
    [sample] = read.samples
    assert sample.turn_ids is not None
    assert int(sample.turn_ids.max()) == 1


def test_the_tool_names_a_file_that_is_no_json(tmp_path: Path, capsys) -> None:
    source = tmp_path / "in.json"
    source.write_text("[")
    with pytest.raises(SystemExit):
        main([str(source), str(tmp_path / "out.jsonl")])
    assert "in.json: is not JSON (Expecting value" in capsys.readouterr().err


@pytest.mark.skipif(not REAL.is_file(), reason="shared/data/tau_bench_airline.json is not there")
def test_the_200_airline_trials(tmp_path: Path) -> None:
    output, few = tmp_path / "airline.jsonl", tmp_path / "few.jsonl"
    main([str(REAL), str(output)])
    lines = output.read_text(encoding="utf-8").splitlines()
    chats = [json.loads(line) for line in lines]
    roles = [message["role"] for chat in chats for message in chat["messages"]]
    assert len(chats) == 200
    assert roles.count("assistant") == 2454
    assert sum(chat["reward"] >= 1 for chat in chats) == 84
    few.write_text("\n".join(lines[:20]), encoding="utf-8")
    read = read_dataset(str(few), ByteTokenizer(), DataConfig(), seq_length=8, vocab_size=257)
    for sample, chat in zip(read.samples, chats, strict=False):
        said = [m for m in chat["messages"] if m["role"] == "assistant"]
        assert sample.turn_ids is not None
        assert int(sample.turn_ids.max()) + 1 == len(said)
        plain = sum(len(m["content"].encode()) + 1 for m in said if m["content"] is not None)
        trained = int(sample.mask.sum())
        assert (trained > plain) == any(m.get("tool_calls") for m in said)
