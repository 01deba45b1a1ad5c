"""rollouts.jsonl after a resume is that of an uninterrupted run, and no disk ends a run."""

import json
from dataclasses import replace

import pytest
import torch

from megatron_ext.environments.arithmetic_demonstrations import demonstrate
from megatron_ext.environments.arithmetic_tasks import TOKENIZER, ArithmeticTasks
from megatron_ext.report.gaps import Gaps
from megatron_ext.rl.transcripts import Transcripts

EPISODES = [demonstrate(ArithmeticTasks().train(i)) for i in range(12)]


def write(
    folder,
    steps,
    *,
    resume_step=None,
    per_step=5,
    max_bytes=10**6,
    is_writer=True,
    gaps=None,
    metadata=None,
):
    episodes = EPISODES if metadata is None else [replace(e, metadata=metadata) for e in EPISODES]
    transcripts = Transcripts(
        str(folder),
        decode=TOKENIZER.decode,
        per_step=per_step,
        max_bytes=max_bytes,
        resume_step=resume_step,
        is_writer=is_writer,
        gaps=gaps,
    )
    for step in steps:
        advantages = torch.arange(12) + 100.0 * step
        transcripts.add_rollouts(step, episodes, advantages=advantages)
        transcripts.add_evaluation(step, episodes)


def test_a_step_has_its_episodes_with_advantage_text_and_ids(tmp_path):
    write(tmp_path, [1, 2])
    lines = [json.loads(s) for s in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1] * 5 + [2] * 5
    for line in lines:
        episode = EPISODES[int(line["advantage"]) - 100 * line["step"]]
        assert line["ids"] == episode.ids
        assert line["reward"] == episode.reward
        assert "".join(part["text"] for part in line["parts"]) == TOKENIZER.decode(episode.ids)
    places = [[line["advantage"] % 100 for line in lines if line["step"] == s] for s in (1, 2)]
    assert places[0] != places[1]


def test_resumed_equals_uninterrupted(tmp_path):
    for folder in ("whole", "killed"):
        (tmp_path / folder).mkdir()
    write(tmp_path / "whole", [1, 2, 3, 4])
    write(tmp_path / "killed", [1, 2, 3])
    with (tmp_path / "killed" / "rollouts.jsonl").open("a") as file:
        file.write('{"step": 4, "torn')
    write(tmp_path / "killed", [3, 4], resume_step=2)
    for name in ("rollouts.jsonl", "evaluations.jsonl"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_new_run_begins_anew_and_stays_within_its_size(tmp_path):
    write(tmp_path, [1, 2])
    write(tmp_path, [1], max_bytes=900)
    written = (tmp_path / "rollouts.jsonl").read_bytes()
    assert 0 < len(written) <= 900
    assert all(json.loads(line)["step"] == 1 for line in written.splitlines())


def test_other_ranks_and_zero_write_nothing(tmp_path):
    write(tmp_path, [1], is_writer=False)
    write(tmp_path, [1], per_step=0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", ["easy", 1, 7, None])
def test_r2_a_task_with_a_step_of_its_own_is_no_matter_to_a_resume(tmp_path, step):
    own = {"step": step, "reward": 99, "group": -1}
    for folder in ("whole", "killed"):
        (tmp_path / folder).mkdir()
    write(tmp_path / "whole", [1, 2, 3], metadata=own)
    write(tmp_path / "killed", [1, 2, 3], metadata=own)
    write(tmp_path / "killed", [3], resume_step=2, metadata=own)
    texts = [(tmp_path / name / "rollouts.jsonl").read_text() for name in ("whole", "killed")]
    assert texts[0] == texts[1]
    assert [json.loads(line)["step"] for line in texts[0].splitlines()] == [1] * 5 + [2] * 5 + [
        3
    ] * 5


@pytest.mark.parametrize("broken", ['{"step": "easy"}\n', "[1]\n", "{}\n", "half a li\n", "\0\0\n"])
def test_r2_lines_of_older_versions_and_damage_do_not_end_a_resume(tmp_path, broken):
    first, later = '{"step": 1, "reward": 1.0}\n', '{"step": 3, "reward": 1.0}\n'
    (tmp_path / "rollouts.jsonl").write_text(first + broken + first + later + '{"step": 3')
    write(tmp_path, [], resume_step=2)
    assert (tmp_path / "rollouts.jsonl").read_text() == first + broken + first


def test_r6_a_full_disk_costs_episodes_and_leaves_no_half_line(tmp_path, caplog):
    """R6: one warning names the file and the reason; the report's end has the count."""
    (tmp_path / "rollouts.jsonl").symlink_to("/dev/full")
    gaps = Gaps()
    write(tmp_path, [1, 2], gaps=gaps)
    assert len((tmp_path / "evaluations.jsonl").read_text().splitlines()) == 10
    [record] = caplog.records
    assert "rollouts.jsonl is incomplete, and the run goes on: No space left" in record.message
    assert gaps.sentences() == ["rollouts.jsonl lacks 10 episodes: No space left on device"]


def test_r12_a_file_at_its_limit_is_said_once_and_at_the_end(tmp_path, caplog):
    gaps = Gaps()
    write(tmp_path, [1, 2, 3], max_bytes=900, gaps=gaps)
    assert len(caplog.records) == 2  # one a file
    assert "rollouts.jsonl is incomplete" in caplog.text
    assert "at its limit of 0.0009 MB (--rollouts-megabytes)" in gaps.sentences()[0]
