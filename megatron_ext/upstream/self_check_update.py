"""Line of the self-check: one update on this layout against the same update on a single process.

The other side is a second run of the tool, on one process and without the flags of the layout; it
leaves its updated weights in the scratch folder.  Both take one step of GRPO+ on the same ragged
sequences.  Adam's epsilon is so large in it that a step goes down the gradient (else rounding of
gradients near 0 would decide on signs), and the rate so large that the step is all one sees of the
new weights.
Invariant the tests check: sound layouts pass; a gradient that is not reduced fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed

from megatron_ext.rl.config import AlgorithmConfig
from megatron_ext.rl.objective import PolicyObjective
from megatron_ext.rl.types import ADVANTAGES, SAMPLER_LOGPROBS
from megatron_ext.upstream.checkpoint_tensors import load_weights, on_writer, save_weights
from megatron_ext.upstream.microbatches import to_device
from megatron_ext.upstream.self_check_setup import (
    Line,
    Setup,
    judged,
    plan_of,
    ragged_samples,
    skipped,
)
from megatron_ext.upstream.update import update

NAME = "one update = one process's"
WRITE_UPDATE = "--write-update"
"""Flag of the second run: only take the step, and leave the weights in this folder."""

_LAYOUT_FLAGS = {
    "--tensor-model-parallel-size": 1,
    "--pipeline-model-parallel-size": 1,
    "--context-parallel-size": 1,
    "--expert-model-parallel-size": 1,
    "--expert-tensor-parallel-size": 1,
    "--num-layers-per-virtual-pipeline-stage": 1,
    "--num-virtual-stages-per-pipeline-rank": 1,
    "--decoder-first-pipeline-num-layers": 1,
    "--decoder-last-pipeline-num-layers": 1,
    "--pipeline-model-parallel-layout": 1,
    "--microbatch-group-size-per-virtual-pipeline-stage": 1,
    "--global-batch-size": 1,
    "--sequence-parallel": 0,
    "--scatter-gather-pipeline-tensors": 0,
    "--account-for-embedding-in-pipeline-split": 0,
    "--account-for-loss-in-pipeline-split": 0,
    "--tp-comm-overlap": 0,
    "--overlap-grad-reduce": 0,
    "--overlap-param-gather": 0,
    "--overlap-p2p-communication": 0,
    "--use-distributed-optimizer": 0,
}
"""What one process does without, and how many words follow each flag."""
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_EPSILON, _RATE = 1e3, 1e9
_EXACT, _HALF = 1e-4, 0.1
"""Differences that pass, relative to the step of each tensor."""


def update_is_single_process(setup: Setup) -> Line:
    """Relative difference of the step of each tensor; the model is left as it was."""
    if torch.distributed.get_world_size() == 1:
        return skipped(NAME, reason="this is one process")
    single = setup.scratch / "single"
    try:
        on_writer(setup.layout, lambda: _run_single(setup.words, folder=single))
        worst = largest_difference(setup, single)
    except (OSError, ValueError) as error:
        advice = f"{error}; --no-single-process leaves this line out"
        return judged(NAME, passed=False, number="-", advice=advice)
    return judged(
        NAME,
        passed=worst <= (_HALF if setup.is_half else _EXACT),
        number=f"relative {worst:.1e} of a tensor's step",
        advice="gradients or the optimizer depend on the layout: leave out its flags one by one "
        "(overlap first) to see which",
    )


def write_update(setup: Setup, *, folder: Path) -> None:
    """What the second run does."""
    take_step(setup)
    save_weights(setup.stepper.model.bare_chunks, setup.layout, folder=folder)


def take_step(setup: Setup) -> None:
    """One update of GRPO+ down the gradient, the same whatever the layout.  Collective."""
    samples = []
    for index, sample in enumerate(ragged_samples(setup)):
        ones = torch.ones(len(sample.tokens))
        extras = {ADVANTAGES: (-0.5 if index % 2 else 1.0) * ones, SAMPLER_LOGPROBS: 0 * ones}
        samples.append(replace(sample, extras=extras))
    microbatches = plan_of(setup, samples).microbatches
    model = setup.stepper.model
    objective = PolicyObjective(config=AlgorithmConfig(algorithm="grpo-plus"), updates_per_batch=1)
    with _no_auxiliary_loss(setup):
        setup.stepper.forward_backward(to_device(microbatches), objective)
    for group in model.optimizer.param_groups:
        group |= {"lr": _RATE, "eps": _EPSILON, "weight_decay": 0.0}
    update(model, setup.layout, num_samples=len(samples))
    model.settle_parameters()


def single_process_words(words: Sequence[str]) -> list[str]:
    """A command line without what belongs to a layout of several ranks."""
    kept, left = [], 0
    for word in words:
        flag, has_value = word.split("=")[0], "=" in word
        if left:
            left -= 1
        elif flag in _LAYOUT_FLAGS:
            left = 0 if has_value else _LAYOUT_FLAGS[flag]
        else:
            kept.append(word)
    return kept


def _run_single(words: Sequence[str], *, folder: Path) -> None:
    """Raises ValueError with the end of what the process said if it failed."""
    command = [sys.executable, *single_process_words(words), WRITE_UPDATE, str(folder)]
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER and not name.startswith("TORCHELASTIC_")
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-3:]
        raise ValueError(f"the single process ended with {done.returncode}: {' '.join(said)}")


def largest_difference(setup: Setup, single: Path) -> float:
    """Over all ranks and tensors: |new - single's new| / |single's new - old|, Euclidean.

    single: folder with the weights that the single process's step led to.  Collective.
    """
    chunks = setup.stepper.model.bare_chunks
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    old = [parameter.detach().clone() for parameter in parameters]
    take_step(setup)
    new = [parameter.detach().clone() for parameter in parameters]
    try:
        load_weights(chunks, setup.layout, folder=single)
        worst = max(
            float((a.double() - b.double()).norm() / (b.double() - o.double()).norm())
            for a, b, o in zip(new, (p.detach() for p in parameters), old, strict=True)
            if not torch.equal(b, o)
        )
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, old, strict=True):
                parameter.copy_(value)
    everywhere: list[float] = [0.0] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, worst)
    return max(everywhere)


@contextmanager
def _no_auxiliary_loss(setup: Setup) -> Iterator[None]:
    """Experts' balance is a property of each microbatch, and microbatches are the layout's."""
    config = setup.stepper.model.config
    coefficients = config.moe_aux_loss_coeff, config.moe_z_loss_coeff
    zeros = [0.0] * len(coefficients[0]) if isinstance(coefficients[0], list) else 0.0
    config.moe_aux_loss_coeff, config.moe_z_loss_coeff = zeros, None
    try:
        yield
    finally:
        config.moe_aux_loss_coeff, config.moe_z_loss_coeff = coefficients
