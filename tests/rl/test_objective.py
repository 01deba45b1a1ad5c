"""The objective of every algorithm equals plain Python over each episode alone, gradients too."""

import math
import random
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from megatron_ext.packing import RowLayout, build_microbatches, filler_microbatch, loss_weights
from megatron_ext.rl.config import AlgorithmConfig
from megatron_ext.rl.objective import PolicyObjective
from megatron_ext.rl.presets import PRESETS
from megatron_ext.rl.types import ADVANTAGES, OLD_LOGPROBS, REFERENCE_LOGPROBS, SAMPLER_LOGPROBS
from tests.rl import naive
from tests.rl.steps import batches, run_step, to_sample

LAWS = {"constant": {"max_length": 7}, "token-sum": {"global_batch_size": 5}}


def preset(name: str) -> tuple[AlgorithmConfig, str]:
    values = dict(PRESETS[name])
    mode = values.pop("loss_normalization")
    return AlgorithmConfig(algorithm=name, **values), mode


def mixed(name: str, **changes) -> tuple[AlgorithmConfig, str]:
    values = {**PRESETS[name], **changes}
    mode = values.pop("loss_normalization")
    return AlgorithmConfig(algorithm=name, **values), mode


CASES = {
    **{name: preset(name) for name in PRESETS},
    "grpo k2": mixed("grpo", kl_estimator="k2", kl_coefficient=0.5),
    "entropy bonus": mixed("dr-grpo", entropy_coefficient=0.1),
    "corrected reinforce": mixed("reinforce", sampler_correction_cap=1.5),
    "corrected gspo": mixed("gspo", sampler_correction_cap=2.0),
    "sequence importance": mixed("gspo", policy_loss="importance"),
    "ppo from the sampler": mixed("ppo", old_policy="sampler"),
}


def weights_of(episodes, *, mode):
    """Weight of each trained token of an episode, by the loss law."""
    trained = [e for e in episodes if e.trained]
    return {
        "global-token-mean": lambda e: 1 / max(sum(len(e.trained) for e in episodes), 1),
        "sample-mean": lambda e: 1 / max(len(e.trained) * len(trained), 1),
        "constant": lambda e: 1 / (7 * len(trained)),
        "token-sum": lambda e: 1 / 5,
    }[mode]


def expected(episodes, config, *, updates, mode):
    """Loss, sum of its terms' sizes and gradients of the whole step, episode by episode."""
    tokens = [naive.token_losses(e, config, updates=updates) for e in episodes]
    weigh = weights_of(episodes, mode=mode)
    loss, size, gradients = 0.0, 0.0, []
    for episode, (losses, slopes) in zip(episodes, tokens, strict=True):
        weight = weigh(episode) if episode.trained else 0.0
        loss += weight * sum(losses.values())
        size += weight * sum(map(abs, losses.values()))
        gradients.append([weight * slopes.get(t, 0.0) for t in range(len(episode.mask))])
    return loss, size, gradients


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=10, deadline=None)
@given(batch=batches(), updates=st.sampled_from([1, 2]), packed=st.booleans())
def test_loss_and_gradient_equal_plain_python(case, batch, updates, packed):
    config, mode = CASES[case]
    episodes, microbatches = batch
    loss, gradients = run_step(
        PolicyObjective(config=config, updates_per_batch=updates),
        [to_sample(episode) for episode in episodes],
        mode=mode,
        microbatches=microbatches,
        packed=packed,
        **LAWS.get(mode, {}),
    )
    want_loss, size, want_gradients = expected(episodes, config, updates=updates, mode=mode)
    # weights are float32, and 1 / n rounds at 6e-8; terms of both signs may cancel
    assert loss == pytest.approx(want_loss, rel=0, abs=1e-6 * size + 1e-9)
    for gradient, plain in zip(gradients, want_gradients, strict=True):
        want = torch.tensor(plain, dtype=torch.float64)
        assert_close(gradient, want, rtol=1e-6, atol=1e-9)
        assert gradient[want == 0].eq(0).all()  # exactly, where nothing is trained


PLACEMENTS = {
    "no KL": {"kl_coefficient": 0.0},
    "KL in the loss": {"kl_coefficient": 0.3, "kl_placement": "loss"},
    "KL in the reward": {"kl_coefficient": 0.3, "kl_placement": "reward"},
}
SAME_POLICY = ("importance-sampling",)
"""Presets whose old policy is the sampler: there is nothing to correct, which is refused."""


def smooth_episodes():
    """Ragged episodes with log-ratios on both sides of every clip, none on an edge of one."""
    draw = random.Random(5)

    def near(values, most):
        return [v + draw.choice([-1, 1]) * draw.uniform(0.05, most) for v in values]

    found = []
    for mask, advantage in (
        ([False, True, True, True, False, True], 1.0),
        ([False, False, True, True], -0.5),
        ([False, True], -2.0),
        ([False, True, True, True, True], 0.25),
    ):
        logp = [-draw.uniform(0.5, 3) for _ in mask]
        found.append(
            naive.Episode(
                logp=logp,
                old=near(logp, 0.6),
                sampler=near(logp, 1.2),
                reference=near(logp, 0.6),
                entropy=[draw.random() for _ in mask],
                mask=mask,
                advantage=advantage,
            )
        )
    return found


@pytest.mark.parametrize("cap", [0.0, 1.5])
@pytest.mark.parametrize("name", PRESETS)
def test_the_gradient_is_that_of_the_logged_loss(name, cap):
    """Against differences of the loss itself, of every combination that is not refused; with
    `gspo` and a cap no token's weight may stand before a ratio that all tokens share."""
    for placement, updates in product(PLACEMENTS, (1, 2)):
        config, mode = mixed(name, sampler_correction_cap=cap, **PLACEMENTS[placement])
        refused = config.problems(loss_normalization=mode)
        assert bool(refused) == (cap > 0 and name in SAME_POLICY), refused
        if refused:
            assert "--old-policy sampler they are the same" in refused[0]
        else:
            assert_gradient_of_the_loss(config, mode=mode, updates=updates)


def assert_gradient_of_the_loss(config, *, mode, updates):
    """Loss and gradient of a step, against `naive.logged_loss` and its differences."""
    episodes = smooth_episodes()
    loss, gradients = run_step(
        PolicyObjective(config=config, updates_per_batch=updates),
        [to_sample(episode) for episode in episodes],
        mode=mode,
        microbatches=[[0, 1, 2], [3]],
        **LAWS.get(mode, {}),
    )

    def logged(logps):
        return naive.logged_loss(
            logps, episodes, config, updates=updates, weigh=weights_of(episodes, mode=mode)
        )

    at = [episode.logp for episode in episodes]
    assert loss == pytest.approx(logged(at), rel=1e-6, abs=1e-7)  # weights are float32
    for gradient, plain in zip(gradients, naive.numerical_gradient(logged, at), strict=True):
        # central differences of step 1e-6 are good to about 1e-8 here
        assert_close(gradient, torch.tensor(plain, dtype=torch.float64), rtol=1e-5, atol=1e-7)


def test_gspo_corrected_without_a_cap_is_gspo_against_the_sampler():
    """The weight of a sequence is a ratio of the same kind: the product leaves out the old one."""
    changes = {"policy_loss": "importance", "sampler_correction_cap": math.inf}
    config, mode = mixed("gspo", **changes)
    direct, _ = mixed("gspo", policy_loss="importance", old_policy="sampler")
    samples = [to_sample(episode) for episode in smooth_episodes()]
    found, want = (
        run_step(
            PolicyObjective(config=c, updates_per_batch=2),
            samples,
            mode=mode,
            microbatches=[[0, 1, 2, 3]],
        )
        for c in (config, direct)
    )
    assert found[0] == pytest.approx(want[0], rel=1e-12)
    for a, b in zip(found[1], want[1], strict=True):
        assert_close(a, b, rtol=1e-12, atol=0)


@settings(max_examples=30, deadline=None)
@given(batch=batches())
def test_gspo_has_the_gradient_of_the_sequence_objective(batch):
    """Against differences of the paper's formula, though each token only knows its own log-prob."""
    config, mode = mixed("gspo", clip_low=0.2, clip_high=0.3)
    episodes = [
        e for e in batch[0] if e.trained and all(abs(e.logp[t] - e.old[t]) < 3 for t in e.trained)
    ]
    if not episodes:
        return

    def objective(logps):
        return naive.gspo_objective(logps, episodes, low=0.2, high=0.3)

    want = naive.numerical_gradient(objective, [e.logp for e in episodes])
    loss, gradients = run_step(
        PolicyObjective(config=config, updates_per_batch=2),
        [to_sample(e) for e in episodes],
        mode=mode,
        microbatches=[list(range(len(episodes)))],
    )
    assert loss == pytest.approx(-objective([e.logp for e in episodes]), rel=1e-6, abs=1e-9)
    for gradient, plain in zip(gradients, want, strict=True):
        # central differences of step 1e-6 are good to about 1e-8 here
        assert_close(-gradient, torch.tensor(plain, dtype=torch.float64), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("case", CASES)
def test_statistics_have_the_announced_names_and_no_graph(case):
    config, _ = CASES[case]
    objective = PolicyObjective(config=config, updates_per_batch=2)
    microbatch = filler_microbatch(RowLayout(extras=dict.fromkeys(objective.extras, torch.float32)))
    logprobs_BS = torch.zeros(1, 1, requires_grad=True)
    terms = objective(logprobs_BS, microbatch, entropy_BS=torch.zeros(1, 1))
    assert tuple(terms.statistics) == objective.statistics
    assert not any(values.requires_grad for values in terms.statistics.values())
    terms.losses_BS.sum().backward()  # also a filler has a graph
    assert logprobs_BS.grad.eq(0).all()


@settings(max_examples=20, deadline=None)
@given(batch=batches())
def test_statistics_equal_plain_python(batch):
    config, mode = mixed("ppo", sampler_correction_cap=1.5, kl_coefficient=0.1)
    objective = PolicyObjective(config=config, updates_per_batch=2)
    episodes = batch[0]
    samples = [to_sample(e) for e in episodes]
    found = token_means(objective, samples, mode=mode)
    tokens = [(e, t) for e in episodes for t in e.trained]
    if not tokens:
        return
    log_ratios = [naive.limited(e.logp[t] - e.old[t]) for e, t in tokens]
    gaps = [naive.limited(e.old[t] - e.sampler[t]) for e, t in tokens]
    exp, expm1 = naive.math.exp, naive.math.expm1
    ratios = [exp(d) for d in log_ratios]
    signs = [e.advantage for e, _ in tokens]
    want = {
        "ratio": ratios,
        "ratio_squared": [r**2 for r in ratios],
        "ratio_deviation": [abs(r - 1) for r in ratios],
        "kl_old": [expm1(d) - d for d in log_ratios],
        "sampler_gap": [abs(g) for g in gaps],
        "sampler_kl": [expm1(g) - g for g in gaps],
        "entropy_estimate": [-e.logp[t] for e, t in tokens],
        "clip_fraction_low": [a < 0 and r < 0.8 for a, r in zip(signs, ratios, strict=True)],
        "clip_fraction_high": [a > 0 and r > 1.2 for a, r in zip(signs, ratios, strict=True)],
        "clip_fraction_dual": [a < 0 and r > 3 for a, r in zip(signs, ratios, strict=True)],
        "sampler_weight": [min(exp(g), 1.5) for g in gaps],
        "sampler_weight_capped": [exp(g) >= 1.5 for g in gaps],
        "kl_reference": [naive.kl(e.logp[t], e.reference[t], "k3")[0] for e, t in tokens],
    }
    assert set(found) == set(want)
    for name, values in want.items():
        assert found[name] == pytest.approx(sum(values) / len(tokens), rel=1e-9, abs=1e-12), name


def token_means(objective, samples, *, mode):
    """Statistics of a step: sums over trained positions divided by their number."""
    microbatches = [[i] for i in range(len(samples))]
    law = loss_weights([s.mask for s in samples], microbatches=microbatches, mode=mode)
    layout = RowLayout(extras={n: v.dtype for n, v in samples[0].extras.items()})
    sums: dict[str, float] = {}
    for microbatch in build_microbatches(
        samples, microbatches=microbatches, loss=law, layout=layout
    ):
        terms = objective(microbatch.extras["logp"], microbatch)
        for name, values in terms.statistics.items():
            kept = torch.where(microbatch.weights_BS != 0, values, 0).sum()
            sums[name] = sums.get(name, 0.0) + float(kept)
    return {name: total / max(sum(law.num_trained), 1) for name, total in sums.items()}


def test_only_what_is_used_has_to_be_computed():
    def extras(name, updates):
        return PolicyObjective(config=preset(name)[0], updates_per_batch=updates).extras

    both = (ADVANTAGES, SAMPLER_LOGPROBS)
    assert extras("grpo-plus", 1) == both
    assert extras("grpo-plus", 4) == (*both, OLD_LOGPROBS)
    assert extras("importance-sampling", 4) == both
    assert extras("reinforce", 1) == both
    assert extras("grpo", 1) == (*both, REFERENCE_LOGPROBS)


def test_missing_inputs_are_named():
    objective = PolicyObjective(config=preset("grpo")[0])
    filler = filler_microbatch(RowLayout(extras={ADVANTAGES: torch.float32}))
    with pytest.raises(AssertionError, match="sampler_logprobs, reference_logprobs"):
        objective(torch.zeros(1, 1), filler)
