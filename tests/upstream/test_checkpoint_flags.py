"""What does not fit is refused as a whole, and the flags about checkpoints do what they say."""

from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_ext.upstream.checkpoint_changes import changes_of_data
from megatron_ext.upstream.checkpoint_folder import RELEASE, TRACKER, folder_of
from megatron_ext.upstream.checkpoint_schedule import schedule_problems
from megatron_ext.upstream.checkpoint_source import Source, check_target, find_source
from tests.ranks import RankPool
from tests.upstream import checkpoint_jobs as jobs
from tests.upstream.checkpoint_jobs import EXACT, MOE

TWO_STEPS = [*EXACT, "--train-iters", "2"]
DISTRIBUTED = "--use-distributed-optimizer"
TP2 = "--tensor-model-parallel-size 2"


@pytest.fixture(scope="module")
def plain(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps on one process."""
    run = tmp_path_factory.mktemp("plain") / "run"
    ranks(1).run(jobs.train, jobs.flags_of(run, *TWO_STEPS))
    return run


@pytest.fixture(scope="module")
def distributed(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the distributed optimizer."""
    run = tmp_path_factory.mktemp("distributed") / "run"
    ranks(1).run(jobs.train, jobs.flags_of(run, *TWO_STEPS, DISTRIBUTED))
    return run


def test_all_reasons_are_listed_at_once(ranks: RankPool, plain: Path):
    changed = f"{DISTRIBUTED} --lr 5e-3 --train-iters 6 --rotary-base 500 --qk-layernorm".split()
    [text] = ranks(1).run(jobs.refusal, jobs.flags_of(plain, *TWO_STEPS, *changed))
    assert "drop --use-distributed-optimizer" in text
    assert "--lr: 0.01 in the checkpoint, 0.005 now" in text
    assert "2 iterations of 8 samples in the checkpoint, 6 iterations of 8 samples now" in text
    assert "--override-opt-param-scheduler" in text
    assert "--use-checkpoint-opt-param-scheduler" in text
    assert "--rotary-base is 500, the checkpoint has 10000." in text
    assert "missing: decoder.layers.self_attention.q_layernorm.weight [4, 4]" in text


def test_tensors_of_model_and_optimizer_are_listed(ranks: RankPool, plain: Path):
    flags = jobs.flags_of(plain, *TWO_STEPS, "--num-layers", "6")
    flags.remove("--untie-embeddings-and-output-weights")
    [text] = ranks(1).run(jobs.refusal, flags)
    name = "decoder.layers.mlp.linear_fc2.weight"
    assert f"misshapen: {name} is [4, 16, 24], the model has [6, 16, 24]" in text
    assert f"misshapen: optimizer.state.exp_avg.{name} is [4, 16, 24]" in text
    assert "extra: output_layer.weight" in text
    assert "extra: optimizer.state.exp_avg_sq.output_layer.weight" in text


def test_what_megatron_cannot_convert_is_refused(
    ranks: RankPool, plain: Path, distributed: Path, tmp_path: Path
):
    [text] = ranks(1).run(jobs.refusal, jobs.flags_of(plain, *TWO_STEPS, "--bf16"))
    assert "from fp32 (neither --bf16 nor --fp16) to --bf16" in text
    [text] = ranks(1).run(jobs.refusal, jobs.flags_of(distributed, *TWO_STEPS))
    assert "add --use-distributed-optimizer" in text
    moe = jobs.flags_of(tmp_path / "moe", *TWO_STEPS, *MOE, "--no-save-optim")
    ranks(1).run(jobs.train, moe)
    [text] = ranks(1).run(jobs.refusal, moe)
    assert "no optimizer state (--no-save-optim): add --no-load-optim" in text


@pytest.mark.slow
def test_experts_are_split_or_not(ranks: RankPool, tmp_path: Path):
    split = ["--expert-model-parallel-size", "2"]
    flags = jobs.flags_of(tmp_path / "run", *TWO_STEPS, *MOE)
    ranks(2).run(jobs.train, [*flags, *split])
    [text, _] = ranks(2).run(jobs.refusal, flags)
    assert "--expert-model-parallel-size from 2 to 1" in text
    [start, _] = ranks(2).run(jobs.resume, [*flags, "--no-load-optim"])
    assert start["progress"] == (2, 16)


@pytest.mark.slow
def test_megatrons_default_optimizer_format(ranks: RankPool, tmp_path: Path):
    """It fits any number of data-parallel ranks, but only its own TP and PP."""
    flags = jobs.flags_of(tmp_path / "run", *TWO_STEPS, DISTRIBUTED)
    ranks(2).run(jobs.train, [*flags, *TP2.split()])
    theirs = tmp_path / "theirs"
    fixed = {"dist_ckpt_optim_fully_reshardable": False}
    ranks(2).run(jobs.saved_again, [*flags, *TP2.split()], theirs, by_megatron=True, **fixed)
    flags += ["--load", str(theirs), "--save", str(tmp_path / "again")]
    ranks(2).run(jobs.saved_again, [*flags, *TP2.split()], tmp_path / "again", by_megatron=False)
    pair = [folder_of(run, 2) for run in (tmp_path / "run" / "saved", tmp_path / "again")]
    [names] = ranks(1).run(jobs.differences, *pair)
    assert all(name.startswith(("megatron_ext", "num_floating", "content_meta")) for name in names)
    [text, _] = ranks(2).run(jobs.refusal, flags)
    assert "--tensor-model-parallel-size 2 to 1" in text


@pytest.mark.parametrize(
    "flag, max_lr, steps",
    [
        ("--override-opt-param-scheduler", 5e-3, 6),
        ("--use-checkpoint-opt-param-scheduler", 1e-2, 2),
    ],
)
def test_a_changed_schedule_is_settled_by_a_flag(
    ranks: RankPool, distributed: Path, tmp_path: Path, flag: str, max_lr: float, steps: int
):
    run = tmp_path / "run"
    jobs.copy_run(distributed, run, step=1)
    changed = [flag, "--lr", "5e-3", "--train-iters", "6", "--save-interval", "6"]
    ranks(1).run(jobs.train, jobs.flags_of(run, *EXACT, DISTRIBUTED, *changed))
    logged = [line["lr"] for line in jobs.metrics(run)]
    shares = [min(1.0, (step - 2) / (steps - 1)) for step in range(2, 7)]  # of the decay
    expected = [1e-3 + (max_lr - 1e-3) * (1 + math.cos(math.pi * share)) / 2 for share in shares]
    assert len(logged) == 6
    assert logged[1:] == pytest.approx(expected, rel=1e-9)


def scheduler(**values) -> OptimizerParamScheduler:
    """Megatron's scheduler over one parameter."""
    usual = {"init_lr": 0.0, "max_lr": 1e-2, "min_lr": 0.0, "lr_warmup_steps": 0}
    usual |= {"lr_decay_steps": 16, "lr_decay_style": "constant", "start_wd": 0.1, "end_wd": 0.1}
    usual |= {"wd_incr_steps": 16, "wd_incr_style": "constant"}
    return OptimizerParamScheduler(
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-2), **usual | values
    )


def test_a_longer_constant_schedule_is_no_change():
    args = Namespace(
        override_opt_param_scheduler=False,
        use_checkpoint_opt_param_scheduler=False,
        global_batch_size=8,
    )
    saved = scheduler().state_dict()
    longer = scheduler(lr_decay_steps=32, wd_incr_steps=32)
    assert not schedule_problems(args, scheduler=longer, saved_args=args, saved=saved)
    warm = scheduler(lr_warmup_steps=8)
    [text] = schedule_problems(args, scheduler=warm, saved_args=args, saved=saved)
    assert "--lr-warmup-iters (or --lr-warmup-fraction): 0 iterations" in text


def test_what_is_not_loaded_starts_afresh(ranks: RankPool, plain: Path, tmp_path: Path):
    run = jobs.flags_of(plain, *TWO_STEPS)
    new = ["--save", str(tmp_path / "new")]
    [usual] = ranks(1).run(jobs.resume, run)
    [fresh] = ranks(1).run(jobs.resume, jobs.flags_of(tmp_path / "empty", *TWO_STEPS))
    [tuned] = ranks(1).run(jobs.resume, [*run, *new, "--finetune"])
    both = ["--load", str(tmp_path / "new"), "--pretrained-checkpoint", str(plain / "saved")]
    [pretrained] = ranks(1).run(jobs.resume, [*run, *new, *both])
    [bare] = ranks(1).run(jobs.resume, [*run, "--no-load-optim", "--no-load-rng"])
    assert usual["progress"] == bare["progress"] == (2, 16)
    assert fresh["progress"] == tuned["progress"] == pretrained["progress"] == (0, 0)
    for start in (tuned, pretrained, bare):
        assert all(map(torch.equal, start["weights"], usual["weights"]))
        assert not start["moments"]
        assert start["schedule"] == 0
        assert torch.equal(start["draw"], fresh["draw"])
    assert usual["moments"]
    assert usual["schedule"] == 16
    assert not torch.equal(usual["weights"][0], fresh["weights"][0])


def sources(root: Path, **flags) -> Source | None:
    """What the given flags start from; ``root`` is --save."""
    usual = {"save": str(root), "load": None, "ckpt_step": None, "finetune": False}
    usual |= {"pretrained_checkpoint": None, "exit_on_missing_checkpoint": False}
    args = Namespace(**usual | flags)
    source = find_source(args)
    check_target(args, source)
    return source


def test_which_checkpoint_a_run_starts_from(plain: Path, tmp_path: Path):
    saved, new = plain / "saved", tmp_path / "new"
    assert sources(new) is None
    assert sources(new, load=str(new)) is None
    found = sources(new, load=str(saved), ckpt_step=1)
    assert found is not None
    assert (found.folder, found.step) == (folder_of(saved, 1), 1)
    (new / RELEASE).mkdir()
    for name in ("metadata.json", ".metadata"):
        (new / RELEASE / name).write_bytes((folder_of(saved, 2) / name).read_bytes())
    (new / TRACKER).write_text(RELEASE)
    found = sources(new, load=str(new))
    assert found == Source(folder=new / RELEASE, only_weights=True)


def test_sources_that_are_refused(plain: Path, tmp_path: Path):
    saved, new = str(plain / "saved"), tmp_path / "new"
    with pytest.raises(ValueError, match=r"--ckpt-step 7: .* It holds 1, 2\."):
        sources(new, load=saved, ckpt_step=7)
    for flags in ({"load": "nowhere"}, {"pretrained_checkpoint": "nowhere"}):
        with pytest.raises(ValueError, match="nowhere holds no complete checkpoint"):
            sources(new, **flags)
    with pytest.raises(ValueError, match="holds no complete checkpoint"):
        sources(new, load=str(new), exit_on_missing_checkpoint=True)
    for flags in ({}, {"load": saved, "finetune": True}):
        with pytest.raises(ValueError, match=r"another run, up to step 2, .* starts at step 0"):
            sources(Path(saved), **flags)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"--save .*file/x cannot be written to"):
        sources(tmp_path / "file" / "x")


def test_other_data_is_said():
    saved = Namespace(seed=5, global_batch_size=16, train_data="a.txt", algorithm="sft")
    now = Namespace(seed=6, global_batch_size=32, train_data="b.txt", algorithm="sft")
    seed, batch, data = changes_of_data(
        now, saved_args=saved, samples_id="3 samples", saved_samples_id="2 samples"
    )
    assert "--seed 5 is now 6" in seed
    assert "--global-batch-size 16 is now 32" in batch
    assert "--train-data a.txt (2 samples) is now b.txt (3 samples)" in data
    moved = Namespace(**vars(saved) | {"train_data": "b.txt"})
    assert not changes_of_data(moved, saved_args=saved, samples_id="x", saved_samples_id="x")
