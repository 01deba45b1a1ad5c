"""rollouts.jsonl after a resume is that of an uninterrupted run."""

import json

import torch

from megatron_ext.environments.arithmetic_demonstrations import demonstrate
from megatron_ext.environments.arithmetic_tasks import TOKENIZER, ArithmeticTasks
from megatron_ext.rl.transcripts import Transcripts

EPISODES = [demonstrate(ArithmeticTasks().train(i)) for i in range(12)]


def write(folder, steps, *, resume_step=None, per_step=5, max_bytes=10**6, is_writer=True):
    transcripts = Transcripts(
        str(folder),
        decode=TOKENIZER.decode,
        per_step=per_step,
        max_bytes=max_bytes,
        resume_step=resume_step,
        is_writer=is_writer,
    )
    for step in steps:
        advantages = torch.arange(12) + 100.0 * step
        transcripts.add_rollouts(step, EPISODES, advantages=advantages)
        transcripts.add_evaluation(step, EPISODES)


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
