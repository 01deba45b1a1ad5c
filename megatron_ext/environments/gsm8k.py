"""GSM8K's format (Cobbe et al. 2021: question, solution that ends in `#### answer`) as tasks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ext.data.json_lines import parse_object
from megatron_ext.environments.datasets import TextTask, read_lines, task_of_record

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


def read_gsm8k(path: str | Path, *, instruction: str = INSTRUCTION) -> list[TextTask]:
    """The tasks of a GSM8K file, in its order, named by their line numbers.

    Raises:
        ValueError: the file holds no task, or lines that are no GSM8K records: each is named.
    """

    def parse(line: bytes, number: str) -> TextTask:
        record = task_of_gsm8k(parse_object(line), instruction=instruction)
        return task_of_record(record, default_id=number)

    return read_lines(path, parse)
