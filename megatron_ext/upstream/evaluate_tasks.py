"""A checkpoint on tasks: what --tasks names, played on any layout, rated.

Invariant the tests check: rates and transcripts do not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count

from megatron_ext.environments.arithmetic import MAX_CONTEXT
from megatron_ext.environments.arithmetic_tasks import TOKENIZER
from megatron_ext.environments.calls import TimedCalls
from megatron_ext.environments.episode import Episode
from megatron_ext.environments.runner import EpisodeRunner
from megatron_ext.environments.sources import open_evaluation
from megatron_ext.evaluation.tasks import Evaluation, evaluation_starts, passes, summarize
from megatron_ext.report.sampling_bar import SamplingBar
from megatron_ext.rewards.verifiers import Verifiers
from megatron_ext.rollout.engine import RolloutEngine
from megatron_ext.upstream.arguments import Options, build_parser
from megatron_ext.upstream.generate import (
    open_codec,
    open_sampler,
    parse_for_sampling,
    play_on_replicas,
    usual_context,
)
from megatron_ext.upstream.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """How much is sampled."""

    num_tasks: int | None
    """None = all of a file, 200 of a source without an end."""
    samples: int
    """Of each task."""
    seed: int
    ks: Sequence[int]
    """pass@k for these."""
    group_by: Sequence[str]
    """Metadata whose values get a pass@1 of their own."""


@dataclass(frozen=True, kw_only=True)
class Played:
    """What came of it, the same on every rank."""

    evaluation: Evaluation
    episodes: list[Episode]
    decode: Callable[[Sequence[int]], str]
    seconds: float
    """That this replica sampled and graded."""
    layout: Layout


def parse_for_tasks(words: Sequence[str], *, max_context: int | None = None) -> Options:
    """`parse_for_sampling`; the built-in tasks bring their vocabulary and their longest episode."""
    parser = build_parser()
    parsed, given = parser.read(words)[0], {flag.name for flag in parser.given(words)}
    if parsed.tasks != "arithmetic":
        return parse_for_sampling(words, max_context=max_context)
    extra = []
    if not parsed.hf_model and "vocab_size" not in given:
        extra = ["--vocab-size", str(TOKENIZER.size)]
        extra += [] if "tokenizer_type" in given else ["--tokenizer-type", "NullTokenizer"]
    length = max_context or usual_context(words, at_most=MAX_CONTEXT)
    options = parse_for_sampling([*words, *extra], max_context=length)
    if options.megatron.vocab_size < TOKENIZER.size:
        raise ValueError(
            f"the model's vocabulary of {options.megatron.vocab_size} has no room for the "
            f"{TOKENIZER.size} characters of --tasks arithmetic: name other tasks."
        )
    return options


def evaluate_tasks(options: Options, sampled: Sampled) -> Played:
    """Play and rate.  Collective.

    Raises:
        ValueError: tasks or checkpoint cannot be had, or every episode failed.
    """
    environments = options.environments
    is_arithmetic = environments.tasks == "arithmetic"
    codec = None if is_arithmetic else open_codec(options)
    with Verifiers(options.rewards) as verify:
        source, tasks = open_evaluation(
            environments, codec=codec, verify=verify, count=sampled.num_tasks
        )
        starts = evaluation_starts(tasks, samples=sampled.samples, seed=sampled.seed)
        decoder = open_sampler(options)
        layout = decoder.layout
        timed_calls = TimedCalls(
            workers=environments.environment_workers,
            time_limit=environments.environment_time_limit,
        )
        runner = EpisodeRunner(
            source.environment,
            limits=environments.limits(
                max_new_tokens=options.rollout.rollout_max_new_tokens,
                max_context=options.megatron.seq_length,
            ),
            sampling=options.rollout.sampling,
            timed_calls=timed_calls,
        )
        with (
            closing(timed_calls),
            SamplingBar(
                total=-(-len(starts) // layout.dp_size),
                unit="episode",
                is_shown=decoder.is_driver and layout.dp_rank == 0,
            ) as bar,
        ):
            engine = RolloutEngine(decoder, options.rollout)
            found = play_on_replicas(engine, runner, starts, layout, on_episode=_shown(bar))
            seconds = bar.seconds
    return Played(
        evaluation=summarize(found, ks=sampled.ks, group_by=sampled.group_by),
        episodes=found,
        decode=TOKENIZER.decode if codec is None else codec.decode,
        seconds=seconds,
        layout=layout,
    )


def _shown(bar: SamplingBar) -> Callable[[Episode], None]:
    """Tells the bar of an episode, and how many have passed so far."""
    played, passed = count(1), 0

    def show(episode: Episode) -> None:
        nonlocal passed
        passed += passes(episode)
        bar.add(episode.num_sampled, also=f"{passed / next(played):.1%} passed")

    return show
