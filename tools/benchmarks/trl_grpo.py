"""Steps of TRL's `GRPOTrainer` for the benchmark `grpo`, in a venv of its own: not imported here.

    python tools/benchmarks/trl_grpo.py job.json

The job: model (a Hugging Face folder), prompts, group_size, batch_size (completions of a
microbatch), steps, threads, lr.  Then, for every step, a line on the standard input with a JSON
list, the tokens of each of its completions, and a line on the standard output with what it took.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]  # of TRL's venv
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessor,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]  # of TRL's venv

REWARDS = 11
"""Different rewards: from the sum of the ids, modulo this; as on our side."""


class FixedLengths(LogitsProcessor):
    """Lets each row of a batch end at its length, by the end-of-text token, and not before."""

    def __init__(self, *, end: int) -> None:
        self.lengths = torch.zeros(0, dtype=torch.int64)
        self._end = end
        self._prompt = 0

    def begin(self, prompt: int) -> None:
        """A batch starts, whose prompts are padded to this many tokens."""
        self._prompt = prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocabulary] of which some are impossible."""
        is_last = input_ids.shape[1] - self._prompt + 1 >= self.lengths
        end = scores[:, self._end].clone()
        scores = scores.masked_fill(is_last[:, None], -torch.inf)
        scores[:, self._end] = torch.where(is_last, end, -torch.inf)
        return scores


class Clock(TrainerCallback):
    """Waits for a line before every step, and writes one after it."""

    def __init__(self, fixed: FixedLengths, out: Any) -> None:
        self._fixed, self._out = fixed, out
        self._started = self._started_cpu = 0.0
        self.rollout_seconds = 0.0
        self.lengths: list[int] = []
        self.prompt_tokens = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The step's lengths."""
        self._fixed.lengths = torch.tensor(json.loads(sys.stdin.readline()))
        self._started, self._started_cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """What the step took, and the lengths that were trained."""
        found = {
            "seconds": time.perf_counter() - self._started,
            "cpu_seconds": time.process_time() - self._started_cpu,
            "rollout_seconds": self.rollout_seconds,
            "lengths": self.lengths,
            "prompt_tokens": self.prompt_tokens,
        }
        self._out.write(json.dumps(found) + "\n")
        self._out.flush()


def main() -> None:
    """Carry out the job of the command line."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print is for the terminal
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(
        job["model"], local_files_only=True, trust_remote_code=False
    )
    model: Any = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=torch.float32, local_files_only=True, trust_remote_code=False
    )
    fixed = FixedLengths(end=tokenizer.eos_token_id)
    clock = Clock(fixed, out)
    generate = model.generate

    def timed_generate(**inputs: Any) -> torch.Tensor:
        fixed.begin(inputs["input_ids"].shape[1])
        clock.prompt_tokens = int(inputs["attention_mask"].sum())
        started = time.perf_counter()
        found = generate(**inputs, logits_processor=[fixed])
        clock.rollout_seconds = time.perf_counter() - started
        return found

    model.generate = timed_generate

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        clock.lengths = [len(ids) for ids in completion_ids]
        return [sum(ids) % REWARDS / (REWARDS - 1) for ids in completion_ids]

    GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config(job),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in job["prompts"]]),
        processing_class=tokenizer,
        callbacks=[clock],
    ).train()


def config(job: dict[str, Any]) -> Any:
    """One update on each rollout batch, fp32, nothing recomputed, no reference policy."""
    episodes = len(job["prompts"]) * job["group_size"]
    return GRPOConfig(
        output_dir=str(Path(job["model"]).parent / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=job["batch_size"],
        gradient_accumulation_steps=episodes // job["batch_size"],
        num_generations=job["group_size"],
        max_completion_length=job["max_new_tokens"],
        max_steps=job["steps"],
        num_iterations=1,
        beta=0.0,
        loss_type="grpo",
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        temperature=1.0,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )


if __name__ == "__main__":
    main()
