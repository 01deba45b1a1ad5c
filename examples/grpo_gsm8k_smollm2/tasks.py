"""Writes the task files of this example.

python examples/grpo_gsm8k_smollm2/tasks.py one-digit tasks.jsonl
python examples/grpo_gsm8k_smollm2/tasks.py gsm8k gsm8k_train.jsonl tasks.jsonl

The first writes all sums and differences of two digits as chats.  The second takes the problems of
a GSM8K file that a small model can sometimes solve, short ones of few calculations, and asks them
after two worked examples, so that an answer is one line and the number.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from itertools import product
from pathlib import Path
from typing import Any

from megatron_ext.data.json_lines import numbered_lines, parse_object
from megatron_ext.environments.gsm8k import task_of_gsm8k

Record = dict[str, Any]
OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b}
SYSTEM = "Write the calculation, then the answer."
WORKED = {
    "Ann has 3 apples and buys 5 more. How many apples does she have?": "3 + 5 = 8\n#### 8",
    "A pen costs $2. How much do 6 pens cost?": "6 x 2 = 12\n#### 12",
}


def one_digit_tasks() -> list[Record]:
    """A task for each of 10 x 10 pairs of digits and two operations."""
    return [
        {
            "messages": [message("user", f"What is {a} {sign} {b}? Answer with the number only.")],
            "answer": operation(a, b),
            "verifier": "numeric",
            "id": f"{a}{sign}{b}",
        }
        for (sign, operation), a, b in product(OPERATIONS.items(), range(10), range(10))
    ]


def short_problems(
    records: list[Record], *, max_characters: int, max_calculations: int
) -> list[Record]:
    """The GSM8K records with a short question and few calculations (`<<...>>`) in the solution."""
    return [
        record
        for record in records
        if len(record["question"]) <= max_characters
        and record["answer"].count("<<") <= max_calculations
    ]


def worked_chat(record: Record) -> Record:
    """A GSM8K record as a task that is asked after the worked examples."""
    task = task_of_gsm8k(record, instruction="")
    worked = [
        part
        for question, answer in WORKED.items()
        for part in (message("user", question), message("assistant", answer))
    ]
    messages = [message("system", SYSTEM), *worked, message("user", task.pop("prompt"))]
    return {"messages": messages, **task}


def message(role: str, content: str) -> dict[str, str]:
    """One message of a chat."""
    return {"role": role, "content": content}


def parse(words: list[str] | None = None) -> Namespace:
    """The command line's values."""
    parser = ArgumentParser(description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    kinds.add_parser("one-digit").add_argument("output", type=Path)
    gsm8k = kinds.add_parser("gsm8k")
    gsm8k.add_argument("file", type=Path)
    gsm8k.add_argument("output", type=Path)
    gsm8k.add_argument("--max-characters", type=int, default=100)
    gsm8k.add_argument("--max-calculations", type=int, default=2)
    return parser.parse_args(words)


def main() -> None:
    """Write the file that the command line asks for."""
    options = parse()
    if options.kind == "one-digit":
        records = one_digit_tasks()
    else:
        short = short_problems(
            [parse_object(line) for _, line in numbered_lines(options.file)],
            max_characters=options.max_characters,
            max_calculations=options.max_calculations,
        )
        records = [worked_chat(record) for record in short]
    text = "".join(json.dumps(record) + "\n" for record in records)
    options.output.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{options.output}: {len(records)} tasks\n")


if __name__ == "__main__":
    main()
