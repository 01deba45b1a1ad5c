"""Every layout samples the single process's tokens, with the trainer's log-probabilities."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from megatron_ext.rollout.config import RolloutConfig
from megatron_ext.rollout.types import Completion
from tests.marks import slow_except
from tests.rank_report import RanksFailed
from tests.ranks import RankPool
from tests.upstream.jobs import LLAMA, MOE, save_initial_weights
from tests.upstream.rollout_jobs import (
    drive_badly,
    fail_on_one_replica,
    layer_by_parts_and_whole,
    sample_and_score,
    sample_over_new_weights,
    train_and_sample,
)

TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
VPP2 = "--num-virtual-stages-per-pipeline-rank 2"
EP2 = "--expert-model-parallel-size 2"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
LAYOUTS = {
    "tp2": ("llama", 2, TP2),
    "tp2 sp": ("llama", 2, f"{TP2} --sequence-parallel"),
    "pp2": ("llama", 2, PP2),
    "pp2 vpp2": ("llama", 2, f"{PP2} {VPP2}"),
    "dp2": ("llama", 2, ""),
    "tp2 pp2 vpp2 sp": ("llama", 4, f"{TP2} --sequence-parallel {PP2} {VPP2}"),
    "moe pp2": ("moe", 2, PP2),
    "moe ep2": ("moe", 2, EP2),
    "latent tp2 sp": ("latent", 2, f"{TP2} --sequence-parallel"),
    "moe tp2 sp": ("moe", 2, f"{TP2} --sequence-parallel"),
}
LATENT = [
    *(word for word in LLAMA if word not in ("--group-query-attention", "--num-query-groups", "2")),
    *[
        "--multi-latent-attention",
        "--q-lora-rank",
        "12",
        "--kv-lora-rank",
        "10",
        "--qk-head-dim",
        "8",
    ],
    *["--qk-pos-emb-head-dim", "4", "--v-head-dim", "6", "--qk-layernorm"],
]
MODELS = {"llama": LLAMA, "moe": MOE, "latent": LATENT}
LOGPROB = 1e-5  # fp32, sums in another order


@pytest.fixture(scope="module")
def reference(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory):
    """Of a model: the weights, and one process's completions, one request at a time."""

    @cache
    def of(model: str) -> tuple[Path, list[Completion]]:
        folder = tmp_path_factory.mktemp(model)
        ranks(1).run(save_initial_weights, MODELS[model], folder)
        plain = RolloutConfig(rollout_share_prefill=False)
        [(completions, gap)] = ranks(1).run(
            sample_and_score, MODELS[model], folder, plain, one_by_one=True
        )
        assert gap < LOGPROB
        return folder, completions

    return of


def check_same(found: list[Completion], expected: list[Completion]) -> None:
    """Same tokens and reasons, log-probabilities within rounding."""
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert [c.stop_reason for c in found] == [c.stop_reason for c in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=LOGPROB)


@pytest.mark.parametrize(
    "config",
    [
        RolloutConfig(),
        RolloutConfig(rollout_slots=3, rollout_prefill_tokens=5),
        RolloutConfig(rollout_slots=8, rollout_cache_tokens=64),
    ],
    ids=["batched", "few slots, prompts in pieces", "little cache"],
)
@pytest.mark.parametrize("model", slow_except({"llama"}, MODELS))
def test_batch_composition_changes_nothing(ranks, reference, model, config):
    folder, expected = reference(model)
    [(found, gap)] = ranks(1).run(sample_and_score, MODELS[model], folder, config)
    check_same(found, expected)
    assert gap < LOGPROB


@pytest.mark.parametrize("name", slow_except({"tp2 pp2 vpp2 sp"}, LAYOUTS))
def test_layout_equals_single_process(ranks, reference, name):
    model, size, flags = LAYOUTS[name]
    folder, expected = reference(model)
    results = ranks(size).run(
        sample_and_score, [*MODELS[model], *flags.split()], folder, RolloutConfig(), timeout=120
    )
    for found, gap in results:
        assert gap < LOGPROB
        check_same(found, expected)


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        pytest.param(2, f"{TP2} --sequence-parallel", marks=pytest.mark.slow),
        pytest.param(4, f"{PP2} {VPP2} {OVERLAP}", marks=pytest.mark.slow),
    ],
    ids=["tp2 sp", "dp2 pp2 vpp2 overlap"],
)
def test_training_goes_on_as_if_nothing_was_sampled(ranks, size, flags):
    """And what is sampled between updates comes from the new weights."""
    words = [*LLAMA, "--micro-batch-size", "2", *flags.split()]
    alone = ranks(size).run(train_and_sample, words, samples=False)
    between = ranks(size).run(train_and_sample, words, samples=True, timeout=120)
    for (losses, _), (expected, _) in zip(between, alone, strict=True):
        assert losses == expected
    assert max(gap for _, gaps in between for gap in gaps) < LOGPROB


@pytest.mark.slow
def test_interrupted_sampling_goes_on_with_new_weights(ranks, reference):
    """Tokens stay, each knows its version, and its log-probability is that version's."""
    folder, uninterrupted = reference("llama")
    [(expected, gap)] = ranks(1).run(sample_over_new_weights, LLAMA, folder)
    assert gap < LOGPROB
    assert any({1, 2} == set(completion.versions) for completion in expected)
    for completion, whole in zip(expected, uninterrupted, strict=True):
        assert list(completion.versions) == sorted(completion.versions)
        old = completion.versions.count(1)
        assert completion.token_ids[:old] == whole.token_ids[:old]
    words = [*LLAMA, *f"{TP2} --sequence-parallel {PP2} {VPP2}".split()]
    for found, gap in ranks(4).run(sample_over_new_weights, words, folder, timeout=120):
        assert gap < LOGPROB
        check_same(found, expected)
        assert [c.versions for c in found] == [c.versions for c in expected]


@pytest.mark.parametrize(
    ("model", "extra"),
    [("llama", []), ("llama", ["--qk-layernorm"]), ("llama", ["--add-qkv-bias"]), ("latent", [])],
    ids=str,
)
def test_layers_by_parts_equal_megatrons_forward(ranks, model, extra):
    [(by_parts, whole)] = ranks(1).run(layer_by_parts_and_whole, [*MODELS[model], *extra])
    check_same(by_parts, whole)


@pytest.mark.parametrize(
    "extra",
    [
        "--rotary-interleaved",
        "--position-embedding-type learned_absolute --normalization LayerNorm",
    ],
)
def test_other_models_agree_with_the_trainer(ranks, tmp_path, extra):
    words = [*LLAMA, *extra.split()]
    ranks(1).run(save_initial_weights, words, tmp_path)
    [(_, gap)] = ranks(1).run(sample_and_score, words, tmp_path, RolloutConfig())
    assert gap < LOGPROB


@pytest.mark.parametrize("model", ["llama", "latent"])
def test_a_residual_stream_in_fp32_agrees_with_the_trainer(ranks, tmp_path, model):
    words = [*MODELS[model], "--bf16", "--fp32-residual-connection"]
    ranks(1).run(save_initial_weights, words, tmp_path)
    [(_, gap)] = ranks(1).run(sample_and_score, words, tmp_path, RolloutConfig())
    assert gap < 0.1  # bf16 weights: 8 bits


def test_an_error_of_the_driver_ends_every_rank(ranks):
    raised = ranks(2).run(drive_badly, [*LLAMA, *TP2.split()])
    assert raised == [
        "KeyError: 'no such episode'",
        "DriverFailed: the rollout's driver, rank 0, raised KeyError: 'no such episode'",
    ]


def test_replicas_that_share_experts_go_on_when_one_fails(ranks):
    failed, found = ranks(2).run(fail_on_one_replica, [*MOE, *EP2.split()])
    assert failed == "KeyError: 'no such episode'"
    assert all(completion.token_ids for completion in found)


def test_models_that_cannot_agree_with_the_trainer_are_refused(ranks):
    words = [*MOE, "--moe-expert-capacity-factor", "1.0"]
    with pytest.raises(RanksFailed, match=r"--moe-expert-capacity-factor 1\.0: which tokens"):
        ranks(1).run(layer_by_parts_and_whole, words)
