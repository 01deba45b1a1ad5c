"""What a rank does in the tests of option values: runs whose reads are recorded, single steps."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import torch

import pretrain_rl
from megatron_ext.upstream.arguments import parse
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.layout import open_layout
from megatron_ext.upstream.model import build_trainable
from megatron_ext.upstream.step import build_stepper
from megatron_ext.upstream.stopping import Stopping
from megatron_ext.upstream.update import update
from tests.upstream.cpu_runs import SMALL
from tests.upstream.jobs import fixed_batch, forward_backward

BYTES = (
    SMALL.replace("--vocab-size 250 --tokenizer-type NullTokenizer ", "")
    + " --progress-interval-seconds 0 --attention-dropout 0 --hidden-dropout 0"
)
LATENT = (
    "--multi-latent-attention --rope-type yarn --q-lora-rank 8 --kv-lora-rank 8 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 8"
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"
TASKS = "--algorithm grpo --group-size 2 --rollout-max-new-tokens 4 --seq-length 160"


class Recording(Namespace):
    """Remembers which values were looked up."""

    def __getattribute__(self, name: str) -> object:
        if not name.startswith("_"):
            object.__getattribute__(self, "__dict__").setdefault("_read", set()).add(name)
        return super().__getattribute__(name)


def recorded_reads(flags: str) -> set[str]:
    """Names of the parsed values that a whole run looks up, Megatron's builders included."""
    with device_mode():
        options = parse(flags.split())
        options.megatron.__class__ = Recording
        layout = open_layout(options.megatron)
        is_supervised = options.algorithm.algorithm == "sft"
        with Stopping(options.megatron) as stop:
            (pretrain_rl.train if is_supervised else pretrain_rl.reinforce)(options, layout, stop)
    return vars(options.megatron)["_read"]


def runs_to_record(folder: Path) -> dict[str, str]:
    """Flags of runs that together read what any run reads; the second continues the first."""
    text = folder / "text.txt"
    text.write_text("hello world, this is a text. " * 50, encoding="utf-8")
    data, saved = f"--train-data {text}", f"--save {folder}/s --load {folder}/s"
    return {
        "supervised": f"{BYTES} {data} --valid-data {text} {saved} --output-dir {folder}/o "
        "--train-iters 1 --lr-decay-style cosine",
        "resumed": f"{BYTES} {data} {saved} --train-iters 2 --lr-decay-style cosine "
        "--override-opt-param-scheduler",
        "experts, latent attention": f"{BYTES} {data} {EXPERTS} {LATENT} --train-iters 1 --bf16",
        "reinforcement": f"{BYTES} {TASKS} --train-iters 1",
    }


def steps_that_fail(lines: list[str]) -> dict[str, str]:
    """One step for each line of flags; what went wrong with those that did not go well."""
    failed, layout = {}, None
    with device_mode():
        for line in lines:
            try:
                options = parse([*SMALL.split(), *["--adam-eps", "1e-5"], *line.split()])
                layout = layout or open_layout(options.megatron)
                model = build_trainable(options.megatron, layout)
                stepper = build_stepper(options, model=model, layout=layout)
                loss = forward_backward(options, stepper, fixed_batch()[:4])
                update(model, layout, num_samples=4)
                values = [p for chunk in model.bare_chunks for p in chunk.parameters()]
                assert all(torch.isfinite(p).all() for p in values), "a parameter is not finite"
                assert loss == loss, "the loss is not a number"
            except SystemExit as stop:
                failed[line] = f"refused: {stop.code}"
            except (ArithmeticError, AssertionError, RuntimeError, TypeError, ValueError) as error:
                failed[line] = f"{type(error).__name__}: {error}"
    return failed
