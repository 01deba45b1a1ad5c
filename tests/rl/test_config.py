"""Options that make no sense together are refused with the reason; presets set known options."""

import math
from dataclasses import fields, replace

import pytest

from megatron_ext.packing import PackingConfig
from megatron_ext.rl.config import AlgorithmConfig
from megatron_ext.rl.presets import PRESETS, overridden, preset_defaults

GRPO = AlgorithmConfig(algorithm="grpo")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_every_option_of_the_algorithm_and_fits_together(name):
    values = dict(PRESETS[name])
    normalization = values.pop("loss_normalization")
    assert set(values) == {f.name for f in fields(AlgorithmConfig)} - {"algorithm"}
    config = AlgorithmConfig(algorithm=name, **values)
    assert config.problems(loss_normalization=normalization) == []
    packing = PackingConfig(
        loss_normalization=normalization,
        loss_normalization_max_length=64 if normalization == "constant" else 0,
    )
    assert packing.problems(seq_length=128) == []


def test_presets_differ_from_grpo_in_what_their_papers_change():
    assert PRESETS["grpo-plus"]["kl_coefficient"] == 0
    assert PRESETS["grpo-plus"]["entropy_coefficient"] == 0
    assert PRESETS["grpo-plus"]["clip_high"] > PRESETS["grpo-plus"]["clip_low"]
    assert PRESETS["grpo-plus"]["overlong_episodes"] == "mask"
    assert PRESETS["dr-grpo"]["advantage_normalization"] == "none"
    assert PRESETS["dr-grpo"]["loss_normalization"] == "constant"
    assert PRESETS["gspo"]["ratio_level"] == "sequence"
    assert PRESETS["decoupled-ppo"]["sampler_correction_cap"] == math.inf
    assert len({tuple(row.items()) for row in PRESETS.values()}) == len(PRESETS)


def test_a_flag_of_the_user_wins_and_is_told():
    values = {**preset_defaults("dapo"), "clip_high": 0.3, "kl_coefficient": 0.1, "other": 1}
    assert overridden("dapo", values) == (
        "preset dapo: --clip-high 0.3 (preset 0.28), --kl-coefficient 0.1 (preset 0.0)"
    )
    assert overridden("dapo", preset_defaults("dapo")) is None
    assert preset_defaults("sft") == preset_defaults(None) == {}


REFUSED = [
    (dict(), dict(temperature=0.0), "--rollout-temperature 0.0 cannot train"),
    (dict(), dict(temperature=-1.0), "--rollout-temperature -1.0 cannot train"),
    (dict(), dict(temperature=math.nan), "--rollout-temperature nan cannot train"),
    (dict(), dict(group_size=1), "--group-size 1 with --advantage-baseline group-mean"),
    (
        dict(advantage_baseline="leave-one-out"),
        dict(group_size=1),
        "--group-size 1 with --advantage-baseline leave-one-out",
    ),
    (
        dict(advantage_baseline="none", advantage_normalization="group-std"),
        {},
        "--advantage-normalization group-std",
    ),
    (
        dict(advantage_baseline="none", zero_variance_groups="drop"),
        {},
        "--zero-variance-groups drop with --advantage-baseline none",
    ),
    (
        dict(policy_loss="likelihood"),
        dict(updates_per_batch=4),
        "--policy-loss likelihood with 4 updates",
    ),
    (
        dict(old_policy="sampler", sampler_correction_cap=2.0),
        {},
        "--sampler-correction-cap corrects from the sampler",
    ),
    (dict(policy_loss="cispo", dual_clip=3.0), {}, "--dual-clip needs --policy-loss clip"),
    (
        dict(policy_loss="cispo", ratio_level="sequence"),
        {},
        "--ratio-level sequence with --policy-loss cispo",
    ),
    (
        dict(ratio_level="sequence"),
        dict(loss_normalization="global-token-mean"),
        "--ratio-level sequence with --loss-normalization global-token-mean",
    ),
    (
        dict(kl_coefficient=0.1),
        dict(has_reference=False),
        "--kl-coefficient 0.1 needs a reference policy",
    ),
    (dict(kl_coefficient=0.1, kl_estimator="k1"), {}, "--kl-estimator k1 in the loss"),
    (dict(overlong_penalty_window=4), {}, "--overlong-penalty-window needs --overlong-penalty"),
    (
        dict(overlong_penalty=1.0, overlong_penalty_window=30),
        dict(max_response_tokens=20),
        "--overlong-penalty-window 30 is longer than the longest response of 20",
    ),
]


@pytest.mark.parametrize(("changes", "run", "reason"), REFUSED, ids=lambda v: str(v)[:40])
def test_what_makes_no_sense_is_refused_with_the_reason(changes, run, reason):
    assert GRPO.problems() == []
    (problem,) = replace(GRPO, **changes).problems(**run)
    assert reason in problem


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(clip_low=-0.1), "--clip-low -0.1 must be from 0 to 1"),
        (dict(clip_high=math.nan), "--clip-high nan is not a finite number"),
        (dict(kl_coefficient=-1.0), "--kl-coefficient -1.0 must be from 0"),
        (dict(dual_clip=0.5), "--dual-clip 0.5 must be above 1"),
        (dict(dual_clip=math.inf), "--dual-clip inf is not a finite number"),
    ],
)
def test_a_number_out_of_range_is_refused(changes, reason):
    with pytest.raises(ValueError, match=reason):
        replace(GRPO, **changes)
    assert replace(GRPO, clip_high=math.inf, sampler_correction_cap=math.inf).problems() == []


def test_all_problems_are_listed():
    config = replace(GRPO, kl_coefficient=0.1, kl_estimator="k1")
    assert len(config.problems(group_size=1, temperature=0.0)) == 3


def test_supervised_training_refuses_options_it_does_not_use():
    assert AlgorithmConfig().problems(group_size=1, temperature=0.0) == []
    (problem,) = AlgorithmConfig(clip_high=0.3, kl_coefficient=0.1).problems()
    assert problem.startswith("--clip-high, --kl-coefficient: --algorithm sft")


def test_what_has_to_be_computed():
    assert not GRPO.needs_reference
    assert replace(GRPO, kl_coefficient=0.1).has_kl_loss
    in_reward = replace(GRPO, kl_coefficient=0.1, kl_placement="reward", kl_estimator="k1")
    assert in_reward.has_kl_reward and not in_reward.has_kl_loss
    assert in_reward.problems() == []
    assert GRPO.needs_old_logprobs(updates_per_batch=2)
    assert not GRPO.needs_old_logprobs(updates_per_batch=1)
    assert not replace(GRPO, old_policy="sampler").needs_old_logprobs(updates_per_batch=2)
    assert GRPO.penalty_window(max_response_tokens=20) == 4
    assert replace(GRPO, overlong_penalty_window=7).penalty_window(max_response_tokens=20) == 7
