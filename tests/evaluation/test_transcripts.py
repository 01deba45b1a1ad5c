"""Transcripts: what an episode looked like, in a file that stops growing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.environments.arithmetic_demonstrations import demonstrate
from megatron_ext.environments.arithmetic_tasks import TOKENIZER, ArithmeticTask
from megatron_ext.environments.episode import EpisodeBuilder
from megatron_ext.evaluation.transcripts import TranscriptFile, shortened, transcript

EPISODE = demonstrate(ArithmeticTask(family="single", start=12, operations=(("+", 7),)))


def test_an_episode_reads_as_a_dialogue():
    assert transcript(EPISODE, decode=TOKENIZER.decode) == {
        "task": "12b+7",
        "group": 0,
        "sample": 0,
        "reward": 1.0,
        "end_reason": "done",
        "tokens": 19,
        "sampled_tokens": 8,
        "metadata": {"family": "single", "level": 1},
        "parts": [
            {"role": "prompt", "text": "Q12b+7?"},
            {"role": "policy", "text": "b+7;"},
            {"role": "environment", "text": "=19;"},
            {"role": "policy", "text": "A19."},
        ],
    }


def test_ids_errors_and_warnings_are_there_when_wanted():
    failed = EpisodeBuilder([1]).finish(
        task_id="t", reward=0.0, end_reason="failed", error="broken", warnings=["slow"]
    )
    record = transcript(failed, decode=TOKENIZER.decode, with_ids=True)
    assert (record["error"], record["warnings"]) == ("broken", ["slow"])
    assert (record["ids"], record["logprobs"]) == ([1], [0.0])


def test_r2_keys_of_a_task_touch_nothing_of_the_record():
    """R2: `step`, `reward`, `group` of a task, in a place of their own."""
    own = {"step": 7, "reward": 99, "group": "easy", "parts": None, "ids": {"a"}, "x": float("nan")}
    episode = EpisodeBuilder([1]).finish(
        task_id="t", reward=0.5, end_reason="done", group=3, metadata=own
    )
    record = transcript(episode, decode=str, with_ids=True)
    assert (record["reward"], record["group"], record["ids"]) == (0.5, 3, [1])
    assert record["metadata"]["reward"] == 99
    assert "step" not in record
    json.dumps(record, allow_nan=False)


@given(st.text(max_size=50), st.integers(0, 60))
def test_a_long_text_is_cut_in_its_middle(text, limit):
    short = shortened(text, limit)
    assert short == text or len(text) > limit
    if len(text) > limit:
        assert short.startswith(text[: limit // 2]) and f"{len(text) - limit} characters" in short


def test_the_file_never_exceeds_its_limit_and_is_continued(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    for _ in range(2):
        file = TranscriptFile(path, max_bytes=1500)
        written = [file.add({"step": step, "text": "é\ud800" * (step % 7)}) for step in range(40)]
        assert file.num_written + file.num_left_out == 40
        assert sum(written) == file.num_written
    assert path.stat().st_size <= 1500
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert records[0] == {"step": 0, "text": ""}
    assert file.num_left_out > 30


def test_a_record_too_long_by_itself_is_left_out(tmp_path):
    file = TranscriptFile(tmp_path / "a.jsonl", max_bytes=10)
    assert not file.add({"text": "x" * 20}) and not (tmp_path / "a.jsonl").exists()
    with pytest.raises(TypeError):
        file.add({(1, 2): "keys are texts"})
