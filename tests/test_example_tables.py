"""Tools of the examples: the tasks they write are tasks, the tables they print have every step."""

from __future__ import annotations

import json
from pathlib import Path

from examples.grpo_gsm8k_smollm2.table import COLUMNS, table
from examples.grpo_gsm8k_smollm2.tasks import WORKED, one_digit_tasks, short_problems, worked_chat
from megatron_ext.environments.datasets import read_tasks, task_of_record

PROBLEM = {
    "question": "Tim has 3 bags of 2 apples. How many apples?",
    "answer": "<<3*2=6>>6\n#### 6",
}


def test_every_sum_of_digits_is_a_task(tmp_path: Path) -> None:
    records = one_digit_tasks()
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    tasks = read_tasks(file)
    assert len({task.id for task in tasks}) == len(records) == 200
    answers = {task.id: task.answer for task in tasks}
    assert answers["7-9"] == "-2" and answers["8+5"] == "13"


def test_short_problems_are_kept_as_they_are() -> None:
    hard = PROBLEM | {"answer": "<<1+1=2>> <<2*3=6>> <<6/2=3>>\n#### 3"}
    long = PROBLEM | {"question": 50 * "very " + "long?"}
    kept = short_problems([hard, PROBLEM, long], max_characters=100, max_calculations=2)
    assert kept == [PROBLEM]


def test_a_problem_is_asked_after_the_worked_examples() -> None:
    task = task_of_record(worked_chat(PROBLEM), default_id="1")
    assert task.answer == "6" and len(task.prompt) == 2 + 2 * len(WORKED)
    last = task.prompt[-1]
    assert last == {"role": "user", "content": PROBLEM["question"]}


def test_a_step_without_an_update_has_dashes(tmp_path: Path) -> None:
    trained = {name: 0.5 for name, _ in COLUMNS.values()}
    idle = {"reward_mean": 0.0, "seconds": 1.25}
    lines = [{"step": 0, "eval_pass_rate": 1.0}, {"step": 1, **trained}, {"step": 2, **idle}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [line.split(" | ") for line in table(tmp_path).splitlines()]
    assert len(rows) == 4 and len(rows[2]) == len(rows[3]) == 1 + len(COLUMNS)
    assert rows[3][0] == "| 2" and "-" in rows[3] and "-" not in rows[2]
