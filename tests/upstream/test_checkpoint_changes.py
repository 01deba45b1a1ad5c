"""A resume says what is no longer as it was, and refuses what cannot go on."""

from __future__ import annotations

import argparse
import copy
import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.upstream import checkpoint
from megatron_ext.upstream.arguments import build_parser
from megatron_ext.upstream.checkpoint_changes import FREE, changes, unresumable
from megatron_ext.upstream.cpu import device_mode
from tests.ranks import RankPool
from tests.upstream import checkpoint_jobs as jobs
from tests.upstream.checkpoint_jobs import EXACT
from tests.upstream.test_checkpoint_damage import Kept

SWITCH = argparse._StoreTrueAction | argparse._StoreFalseAction
TWO_STEPS = [*EXACT, "--train-iters", "2"]
ACTIONS = {
    a.dest: a for a in reversed(build_parser()._actions) if a.option_strings and a.dest != "help"
}


def defaults(**values: Any) -> Namespace:
    """The parser's values, some changed."""
    usual = {name: copy.copy(action.default) for name, action in ACTIONS.items()}
    return Namespace(**usual | {"algorithm": "grpo", "global_batch_size": 8} | values)


def told(saved: Namespace, now: Namespace) -> list[str]:
    """What a resume lists."""
    return changes(now, saved_args=saved, samples_id="", saved_samples_id="")


def test_R7_old_and_new_value_of_every_option_that_matters():
    saved = defaults()
    now = defaults(
        algorithm="dapo",
        kl_coefficient=0.1,
        clip_high=0.28,
        rollout_temperature=0.5,
        loss_normalization="sample-mean",
        adam_beta2=0.9,
        clip_grad=5.0,
        rollout_top_k=4,
        shuffle_rewards=True,
        output_dir="elsewhere",
        tensor_model_parallel_size=2,
        log_interval=7,
    )
    assert sorted(told(saved, now)) == [
        "--adam-beta2: 0.999 -> 0.9",
        "--algorithm: grpo -> dapo",
        "--clip-grad: 1.0 -> 5.0",
        "--clip-high: 0.2 -> 0.28",
        "--kl-coefficient: 0.0 -> 0.1",
        "--loss-normalization: global-token-mean -> sample-mean",
        "--rollout-temperature: 1.0 -> 0.5",
        "--rollout-top-k: 0 -> 4",
        "--shuffle-rewards: not given -> given",
    ]
    assert not told(saved, defaults())


def test_R7_every_option_is_free_or_told():
    assert set(FREE) <= set(ACTIONS), "an option that does not exist"
    named_by_samples = {"train_data", "tasks", "task_seed", "group_size", "seed"}
    values = {
        name: not action.default if isinstance(action, SWITCH) else "another"
        for name, action in ACTIONS.items()
        if name not in {"global_batch_size", "use_checkpoint_opt_param_scheduler"}
    }
    flags = {line.split(": ")[0] for line in told(defaults(seed=1), defaults(**values))[1:]}
    told_of = {name for name, a in ACTIONS.items() if not flags.isdisjoint(a.option_strings)}
    assert told_of == values.keys() - FREE - named_by_samples
    assert len(flags) == len(told_of) > 400


def test_R7_fields_of_other_versions_are_no_change():
    saved = defaults(field_of_a_later_version=3)
    vars(saved).pop("kl_coefficient")
    assert not told(saved, defaults())


def test_R7_what_cannot_go_on_is_refused():
    now = defaults(algorithm="sft", optimizer="sgd")
    kind, optimizer = unresumable(now, defaults())
    assert "--algorithm grpo is now sft" in kind
    assert "--finetune" in kind
    assert "--optimizer adam is now sgd" in optimizer
    assert not unresumable(defaults(algorithm="dapo"), defaults())


def test_R7_other_tasks_are_named():
    [line] = changes(
        defaults(tasks="b.jsonl"),
        saved_args=defaults(tasks="a.jsonl"),
        samples_id="tasks b.jsonl",
        saved_samples_id="tasks a.jsonl",
    )
    assert line.startswith("--tasks a.jsonl (tasks a.jsonl) is now b.jsonl (tasks b.jsonl)")


def resumed(flags: list[str]) -> tuple[list[str], list[Any]]:
    """What a resume warns of; betas and weight decay that its optimizer goes on with."""
    kept = Kept()
    logging.getLogger("megatron_ext").addHandler(kept)
    with device_mode():
        args, model, layout = jobs.build(flags)
        kept.texts.clear()
        checkpoint.resume(args, model, layout)
    return kept.texts, [(group["betas"], group["eps"]) for group in model.optimizer.param_groups]


@pytest.mark.slow
@pytest.mark.parametrize("distributed", [[], ["--use-distributed-optimizer"]], ids=str)
def test_R7_a_resume_warns_once_and_the_flags_hold(
    ranks: RankPool, tmp_path: Path, distributed: list[str]
):
    flags = jobs.flags_of(tmp_path / "run", *TWO_STEPS, *distributed)
    ranks(1).run(jobs.train, flags)
    [(texts, _)] = ranks(1).run(resumed, flags)
    assert [text for text in texts if "not as it would have" in text] == []
    changed = ["--adam-beta2", "0.9", "--adam-eps", "1e-6", "--clip-grad", "2"]
    [(texts, groups)] = ranks(1).run(resumed, [*flags, *changed])
    [text] = [text for text in texts if "goes on, but not as it would have" in text]
    for line in (
        "--adam-beta2: 0.999 -> 0.9",
        "--adam-eps: 1e-05 -> 1e-06",
        "--clip-grad: 1.0 -> 2.0",
    ):
        assert line in text
    assert set(groups) == {((0.9, 0.9), 1e-6)}
