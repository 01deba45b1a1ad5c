"""GSM8K's format (Cobbe et al. 2021: question, solution that ends in `#### answer`) as tasks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

INSTRUCTION = "Reason step by step, then write the answer as `#### number` on the last line."


def task_of_gsm8k(record: Mapping[str, Any], *, instruction: str = INSTRUCTION) -> dict[str, Any]:
    """One GSM8K record as a task of `datasets.read_tasks`, with the verifier numeric.

    instruction: put after the question; empty = the question alone.

    Raises:
        ValueError: it has no question, or its solution no `####` with an answer.
    """
    question, solution = record.get("question"), record.get("answer")
    if not isinstance(question, str) or not isinstance(solution, str):
        raise ValueError("has no texts `question` and `answer`")
    reasoning, mark, answer = solution.rpartition("####")
    if not mark or not answer.strip():
        raise ValueError("`answer` does not end in `#### number`")
    return {
        "prompt": f"{question.strip()}\n{instruction}".strip(),
        "answer": answer.strip().replace(",", ""),
        "verifier": "numeric",
        "metadata": {"source": "gsm8k", "solution": reasoning.strip()},
    }


def convert_gsm8k(source: str | Path, target: str | Path, *, instruction: str = INSTRUCTION) -> int:
    """Write a GSM8K file as a task file; the number of tasks.

    Raises:
        ValueError: a line is no GSM8K record; it is named with its number.
    """
    lines = []
    for number, line in enumerate(Path(source).read_text(encoding="utf-8").splitlines(), start=1):
        try:
            task = task_of_gsm8k(json.loads(line), instruction=instruction)
        except ValueError as error:
            raise ValueError(f"{source}, line {number}: {error}") from error
        lines.append(json.dumps(task, ensure_ascii=False) + "\n")
    Path(target).write_text("".join(lines), encoding="utf-8")
    return len(lines)
