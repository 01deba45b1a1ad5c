"""The record of an episode: only what was sampled is trained, and ids stay what they were."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.environments.episode import SAMPLER_LOGPROBS, EpisodeBuilder
from megatron_ext.rl import types as rl_types

IDS = st.lists(st.integers(0, 2**31), max_size=5)
TURNS = st.lists(st.tuples(st.booleans(), IDS), max_size=8)


def finish(builder):
    return builder.finish(task_id="t", reward=1.0, end_reason="done")


def test_system_user_assistant_tool_assistant():
    """CASES.md D11: one token each; only what the assistant said is trained."""
    builder = EpisodeBuilder([10, 11])
    builder.append_sampled([12])
    builder.append_given([13])
    builder.append_sampled([14])
    episode = finish(builder)
    assert episode.mask == [False, False, True, False, True]
    assert episode.turn_ids == [-1, -1, 0, -1, 1]
    assert (episode.num_turns, episode.num_sampled) == (2, 2)


@given(IDS.filter(bool), TURNS)
def test_an_episode_is_what_was_appended(prompt, turns):
    builder = EpisodeBuilder(prompt)
    ids, sampled = list(prompt), []
    for is_sampled, new in turns:
        if is_sampled:
            places = range(len(ids), len(ids) + len(new))
            builder.append_sampled(new, logprobs=[-float(p) for p in places], versions=places)
            sampled += places
        else:
            builder.append_given(new)
        ids += new
    episode = finish(builder)
    assert episode.ids == ids
    assert [i for i, is_trained in enumerate(episode.mask) if is_trained] == sampled
    assert [i for i, version in enumerate(episode.versions) if version >= 0] == sampled
    assert all(episode.logprobs[i] == (-i if i in sampled else 0) for i in range(len(ids)))
    assert [i for span in episode.spans() for i in span.ids] == ids


def test_parts_have_their_roles():
    builder = EpisodeBuilder([1, 2])
    builder.append_sampled([3])
    builder.append_given([4, 5])
    builder.append_sampled([6])
    builder.append_sampled([7])
    assert list(finish(builder).spans()) == [
        ("prompt", [1, 2]),
        ("policy", [3]),
        ("environment", [4, 5]),
        ("policy", [6]),
        ("policy", [7]),
    ]


def test_a_sample_has_the_same_values():
    builder = EpisodeBuilder([5, 6])
    builder.append_sampled([7, 8], logprobs=[-1.5, -2.5], versions=[3, 4])
    builder.append_given([9])
    sample = finish(builder).to_sample(advantages=2.5)
    assert sample.tokens.tolist() == [5, 6, 7, 8, 9]
    assert sample.mask.tolist() == [False, False, True, True, False]
    assert sample.turn_ids is not None and sample.turn_ids.tolist() == [-1, -1, 0, 0, -1]
    assert sample.extras[SAMPLER_LOGPROBS].tolist() == [0, 0, -1.5, -2.5, 0]
    assert sample.extras["advantages"].tolist() == [0, 0, 2.5, 2.5, 0]
    assert sample.tokens.dtype == torch.int64 and sample.mask.dtype == torch.bool
    assert SAMPLER_LOGPROBS == rl_types.SAMPLER_LOGPROBS
    assert set(sample.extras) == {SAMPLER_LOGPROBS, "advantages"}  # all of it goes to the device


def test_f10_versions_are_kept_for_every_token():
    builder = EpisodeBuilder([5])
    builder.append_sampled(range(10), logprobs=[-1.0] * 10, versions=[3] * 5 + [4] * 5)
    assert finish(builder).versions == [-1, *[3] * 5, *[4] * 5]


def test_each_id_needs_its_log_prob():
    with pytest.raises(ValueError, match="2 ids, 1 log-probs and 2 versions"):
        EpisodeBuilder([1]).append_sampled([2, 3], logprobs=[-1.0])
