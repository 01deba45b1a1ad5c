"""Demonstrations as training samples."""

import random

from megatron_ext.environments.arithmetic_demonstrations import draw_demonstration
from megatron_ext.environments.arithmetic_samples import DemonstrationSamples
from megatron_ext.environments.arithmetic_tasks import TOKENIZER
from megatron_ext.environments.split import is_held_out

SAMPLES = DemonstrationSamples(count=300, seed=4)


def test_a_sample_is_a_function_of_seed_and_place():
    again = DemonstrationSamples(count=100, seed=4)
    for place in (0, 7, 99):
        assert again[place].tokens.equal(SAMPLES[place].tokens)
        assert again[place].mask.equal(SAMPLES[place].mask)
    other = DemonstrationSamples(count=100, seed=5)
    assert any(not other[i].tokens.equal(SAMPLES[i].tokens) for i in range(5))
    assert len(SAMPLES) == 300
    assert [len(s.tokens) for s in SAMPLES[2:4]] == [len(SAMPLES[i].tokens) for i in (2, 3)]
    assert SAMPLES[-1].tokens.equal(SAMPLES[299].tokens)


def test_what_is_trained_is_what_the_policy_says():
    episode = draw_demonstration(random.Random("demonstration 4 0"))
    assert SAMPLES[0].tokens.tolist() == episode.ids
    assert SAMPLES[0].mask.tolist() == episode.mask
    assert not SAMPLES[0].extras


def test_no_held_out_task_is_demonstrated():
    for sample in SAMPLES:
        prompt = TOKENIZER.decode(sample.tokens.tolist()).partition("?")[0]
        assert not is_held_out(prompt.removeprefix("Q"))
