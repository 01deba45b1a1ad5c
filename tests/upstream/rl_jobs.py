"""What a rank does in the tests of reinforcement learning: updates on given episodes, runs."""

from __future__ import annotations

import contextlib
import io
import json
import random
from pathlib import Path
from shlex import split
from typing import Any

import pretrain_rl
from megatron_ext.environments.episode import Episode, EpisodeBuilder
from megatron_ext.rl.learning import learn
from megatron_ext.rl.phases import Phases
from megatron_ext.rl.step_metrics import learning_metrics
from megatron_ext.upstream.arguments import parse
from megatron_ext.upstream.checkpoint import load_weights, save_weights
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.layout import open_layout
from megatron_ext.upstream.learner import MegatronLearner
from megatron_ext.upstream.model import build_trainable
from megatron_ext.upstream.rl_run import planner_of
from megatron_ext.upstream.step import build_stepper
from tests.upstream.jobs import SEQ_LENGTH, VOCAB_SIZE

NUM_GROUPS, GROUP_SIZE = 4, 4
EPISODES = NUM_GROUPS * GROUP_SIZE
CLOCKED = ("seconds", "_per_second", "memory_bytes")
"""Endings of metrics that a clock or the machine decides."""


def fixed_episodes() -> list[Episode]:
    """Groups of ragged dialogues with mixed rewards; one is constant, one member failed, one was
    cut."""
    draw = random.Random(3)
    found = []
    for number in range(EPISODES):
        group, sample = divmod(number, GROUP_SIZE)
        builder = EpisodeBuilder(ids(draw, 2, 4))
        for turn in range(draw.randint(1, 3)):
            if turn:
                builder.append_given(ids(draw, 1, 2))
            said = ids(draw, 1, 4)
            logprobs = [-5.5 + draw.uniform(-0.3, 0.3) for _ in said]  # ln 250 is 5.52
            builder.append_sampled(said, logprobs=logprobs, versions=[0] * len(said))
        reward = 1.0 if group == 1 else float(draw.random() < 0.5)
        end = {5: "failed", 9: "length"}.get(number, "done")
        found.append(
            builder.finish(
                task_id=str(group), group=group, sample=sample, reward=reward, end_reason=end
            )
        )
    assert max(len(episode.ids) for episode in found) <= SEQ_LENGTH
    return found


def ids(draw: random.Random, least: int, most: int) -> list[int]:
    """Random token ids."""
    return [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(least, most))]


def learn_each(cases: dict[str, list[str]], initial: Path, out: Path) -> dict[str, dict]:
    """For every case (its flags) the metrics of the updates on the fixed episodes, from the same
    weights; new weights go to a folder of the case's name."""
    found = {}
    with device_mode():
        layout = None
        for name, flags in cases.items():
            options = parse(flags)
            layout = layout or open_layout(options.megatron)
            model = build_trainable(options.megatron, layout)
            load_weights(model.bare_chunks, layout, folder=initial)
            model.optimizer.reload_model_params()
            stepper = build_stepper(options, model=model, layout=layout)
            learner = MegatronLearner(options, stepper, is_new=True)
            learned = learn(
                learner,
                fixed_episodes(),
                algorithm=options.algorithm,
                loop=options.loop,
                planner=planner_of(options, layout),
                max_response_tokens=12,
                phases=Phases(),
            )
            model.settle_parameters()
            save_weights(model.bare_chunks, layout, folder=out / name)
            found[name] = learning_metrics(learned)
    return found


def run(words: list[str]) -> None:
    """A whole job of pretrain_rl.py."""
    pretrain_rl.main(words)


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """What the run logged, but for what a clock decides."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not k.endswith(CLOCKED)} for line in lines
    ]


SMALL = split(
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 96 "
    "--position-embedding-type rope --rotary-base 1000 --normalization RMSNorm "
    "--disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.1 "
    "--untie-embeddings-and-output-weights --make-vocab-size-divisible-by 8 --seq-length 160 "
    "--seed 3 --adam-beta2 0.95 --adam-eps 1e-5 --packing --max-tokens-per-microbatch 1200 "
    "--no-report-html --no-tensorboard-events --progress-interval-seconds 0"
)
WARM_START = split(
    "--train-data arithmetic-demonstrations --global-batch-size 32 --train-iters 200 --lr 1e-2"
)
REINFORCE = split(
    "--algorithm grpo-plus --group-size 4 --global-batch-size 16 --train-iters 3 --lr 1e-3 "
    "--rollout-max-new-tokens 40 --eval-every 2 --eval-count 12 --eval-samples 2"
)


def warm_start(folder: Path) -> None:
    """A policy that knows how an answer looks, and the answers of a few sums of digits."""
    words = [*SMALL, *WARM_START, "--output-dir", str(folder / "out"), "--save", str(folder)]
    pretrain_rl.main(words)


def flags_of(folder: Path, warm: Path, *more: str) -> list[str]:
    """Of a run that starts from the warm policy and can be continued by the same command."""
    saved = str(folder / "saved")
    return [
        *SMALL,
        *REINFORCE,
        *("--pretrained-checkpoint", str(warm), "--output-dir", str(folder)),
        *("--save", saved, "--load", saved, *more),
    ]


def refusal(words: list[str]) -> str:
    """What a refused job says, and that it ends with status 2."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            pretrain_rl.main(words)
        except SystemExit as exit:
            assert exit.code == 2
            return said.getvalue()
    raise AssertionError("the job was not refused")
