"""The parts of a reinforcement-learning run, put together from a command line's options."""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_ext.environments.arithmetic import MAX_CONTEXT
from megatron_ext.environments.arithmetic_tasks import TOKENIZER
from megatron_ext.environments.base import EpisodeLimits, TaskSource
from megatron_ext.environments.calls import TimedCalls
from megatron_ext.environments.codecs import ModelCodec, open_codec
from megatron_ext.environments.runner import EpisodeRunner
from megatron_ext.environments.sources import open_source
from megatron_ext.packing.batch import Sample
from megatron_ext.packing.plan import StepPlan, plan_step
from megatron_ext.report.gaps import Gaps
from megatron_ext.report.recorder import RunRecorder
from megatron_ext.rewards.verifiers import Verifiers
from megatron_ext.rl.evaluation import Evaluator
from megatron_ext.rl.learning import Planner
from megatron_ext.rl.loop import ReinforcementLoop
from megatron_ext.rl.stop import Stop
from megatron_ext.rl.transcripts import Transcripts
from megatron_ext.rl.watch import Watch
from megatron_ext.rollout.types import SamplingParams
from megatron_ext.upstream.arguments import Options
from megatron_ext.upstream.checkpoint import Progress
from megatron_ext.upstream.checkpoint_tensors import on_writer
from megatron_ext.upstream.hf_source import stop_ids_of_record
from megatron_ext.upstream.layout import Layout
from megatron_ext.upstream.learner import MegatronLearner
from megatron_ext.upstream.microbatches import replica_of

logger = logging.getLogger(__name__)

MEGABYTE = 1_000_000


def open_tasks(
    options: Options, verify: Verifiers
) -> tuple[TaskSource, Callable[[Sequence[int]], str]]:
    """The tasks of --tasks, and what turns token ids into text.

    Raises:
        ValueError: a file is missing or malformed, a data set unknown, or there is no tokenizer.
    """
    codec = _codec(options)
    source = open_source(options.environments, codec=codec, verify=verify)
    return source, TOKENIZER.decode if codec is None else codec.decode


def _codec(options: Options) -> ModelCodec | None:
    """The model's tokenizer; None for the built-in tasks, which have their own."""
    args = options.megatron
    if options.environments.tasks == "arithmetic":
        return None
    return open_codec(
        kind=args.tokenizer_type,
        model=args.tokenizer_model,
        checkpoint=args.hf_model or None,
        more_stop_ids=stop_ids_of_record(args),
        chat_template=args.chat_template,
        prompts_as_messages=options.environments.tasks_as_chat,
    )


def tasks_id(options: Options) -> str:
    """What a resumed run knows its tasks by; of a file, also its contents."""
    tasks = options.environments
    path = Path(tasks.tasks.removeprefix("gsm8k:"))
    is_read = path.is_file() and os.access(path, os.R_OK)  # else `open_tasks` says why not
    contents = f", contents {zlib.crc32(path.read_bytes()):08x}" if is_read else ""
    named = f"tasks {tasks.tasks}, seed {tasks.task_seed}, groups of {options.loop.group_size}"
    return named + contents


def episode_limits(options: Options) -> EpisodeLimits:
    """Where episodes are cut: what is sampled must fit the rows that are trained."""
    args = options.megatron
    longest = min(args.seq_length, options.packing.row_capacity(seq_length=args.seq_length))
    if options.environments.tasks == "arithmetic":
        longest = min(longest, MAX_CONTEXT)
    return options.environments.limits(
        max_new_tokens=options.rollout.rollout_max_new_tokens, max_context=longest
    )


def planner_of(options: Options, layout: Layout) -> Planner:
    """How samples become microbatches in this job."""
    args, replica = options.megatron, replica_of(layout, options)
    plain = replace(
        options.packing, loss_normalization="global-token-mean", loss_denominator="counted"
    )

    def for_training(samples: Sequence[Sample], global_batch_size: int) -> StepPlan:
        return plan_step(
            samples,
            options.packing,
            replica=replica,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            global_batch_size=global_batch_size,
        )

    def for_scoring(samples: Sequence[Sample]) -> StepPlan:
        return plan_step(
            samples,
            plain,
            replica=replica,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
        )

    return Planner(for_training=for_training, for_scoring=for_scoring)


def open_loop(
    options: Options,
    learner: MegatronLearner,
    *,
    verify: Verifiers,
    start: Progress,
    stop: Stop,
    gaps: Gaps,
) -> ReinforcementLoop:
    """Everything but the loop over steps; to be closed.  gaps: told of episodes that get lost.

    Raises:
        OSError: the record of an earlier process cannot be continued.
        ValueError: the tasks cannot be opened, or there are too few held-out ones.
    """
    args, config, tasks = options.megatron, options.loop, options.environments
    if learner.is_writer and (changed := options.as_record().get("changed_preset")):
        logger.warning("%s", changed)
    source, decode = open_tasks(options, verify)
    limits = episode_limits(options)
    calls = None
    if not source.environment().is_instant:
        calls = TimedCalls(
            workers=tasks.environment_workers, time_limit=tasks.environment_time_limit
        )

    def runner(sampling: SamplingParams) -> EpisodeRunner:
        return EpisodeRunner(
            source.environment, limits=limits, sampling=sampling, timed_calls=calls
        )

    transcripts = Transcripts(
        options.report.output_dir,
        decode=decode,
        per_step=config.rollouts_per_step,
        max_bytes=int(config.rollouts_megabytes * MEGABYTE),
        resume_step=start.step or None,
        is_writer=learner.is_writer,
        gaps=gaps,
    )
    evaluator = None
    if config.eval_every:
        evaluator = Evaluator(
            greedy=runner(SamplingParams(temperature=0)),
            sampled=runner(options.rollout.sampling),
            tasks=source.held_out(config.eval_count),
            samples=config.eval_samples,
            seed=args.seed,
        )
    return ReinforcementLoop(
        policy=learner,
        source=source,
        runner=runner(options.rollout.sampling),
        evaluator=evaluator,
        algorithm=options.algorithm,
        config=config,
        planner=planner_of(options, learner.layout),
        watch=Watch(
            options.algorithm,
            is_half=args.bf16 or args.fp16,
            is_writer=learner.is_writer,
            idle_steps=start.idle_steps,
        ),
        transcripts=transcripts,
        batch_size=args.global_batch_size,
        max_response_tokens=options.rollout.rollout_max_new_tokens,
        seed=args.seed,
        timed_calls=calls,
        stop=stop,
    )


def evaluate_first(
    loop: ReinforcementLoop, recorder: RunRecorder, layout: Layout, *, step: int
) -> None:
    """The evaluation before the first step, or the one that a run was stopped in."""
    recorded = on_writer(layout, lambda: recorder.resumed_metrics)
    if step == 0:
        if found := loop.evaluate(0):
            recorder.log(0, found)
    elif recorded and not any(name.startswith("eval_") for name in recorded):
        recorder.amend(step, loop.evaluate(step))
