"""Many episodes of the built-in tasks by the rollout engine: how long they take, what they leave.

A tiny policy of random weights on Megatron plays them, in rollouts of --batch episodes.  It
rambles, so its episodes are longer than those of a policy that has learned something.
"""

from __future__ import annotations

import gc
import resource
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

from tqdm import tqdm

from megatron_ext.environments.arithmetic import MAX_CONTEXT, ArithmeticSource
from megatron_ext.environments.base import EpisodeLimits, EpisodeStart
from megatron_ext.environments.episode import Episode
from megatron_ext.environments.runner import EpisodeRunner
from megatron_ext.rollout.config import RolloutConfig
from megatron_ext.rollout.engine import RolloutEngine
from megatron_ext.upstream.arguments import parse
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.layout import close_layout, open_layout
from megatron_ext.upstream.model import build_chunks
from megatron_ext.upstream.rollout import MegatronDecoder
from tools.benchmarks.rollout import TINY

GROUP = 8
"""Episodes of one task."""
WARM_UP = 0.2
"""Share of the episodes after which memory is measured first."""


def add_arguments(parser: ArgumentParser) -> None:
    """Options of the subcommand."""
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=512, help="episodes of a rollout")
    parser.add_argument("--slots", type=int, default=128)


def run(options: Namespace) -> dict[str, object]:
    """Play them and measure."""
    with device_mode():
        parsed = parse([*TINY.split(), "--seq-length", str(MAX_CONTEXT)])
        layout = open_layout(parsed.megatron)
        chunks = build_chunks(parsed.megatron, layout, wrap=False)
        decoder = MegatronDecoder(parsed.megatron, layout, chunks)
        engine = RolloutEngine(decoder, RolloutConfig(rollout_slots=options.slots))
        figures = measure(engine, options)
        close_layout()
    return figures


def measure(engine: RolloutEngine, options: Namespace) -> dict[str, object]:
    """Time, tokens, and the memory after the warm-up and at the end."""
    source = ArithmeticSource()
    limits = EpisodeLimits(max_new_tokens=MAX_CONTEXT, max_context=MAX_CONTEXT)
    runner = EpisodeRunner(source.environment, limits=limits)
    lengths: list[int] = []
    memory: dict[str, float] = {}
    blocks: dict[str, int] = {}
    cpu, started = time.process_time(), time.perf_counter()
    with tqdm(total=options.episodes, unit="episode", leave=False) as bar:
        for first in range(0, options.episodes, options.batch):
            starts = [
                EpisodeStart(
                    task=source.train(place // GROUP),
                    group=place // GROUP,
                    sample=place % GROUP,
                    seed=place // GROUP,
                )
                for place in range(first, min(first + options.batch, options.episodes))
            ]
            lengths += _played(engine, runner, starts)
            bar.update(len(starts))
            moment = "warm" if len(lengths) < options.episodes else "end"
            if moment == "end" or len(lengths) <= max(WARM_UP * options.episodes, options.batch):
                gc.collect()
                memory[moment], blocks[moment] = _resident_mib(), sys.getallocatedblocks()
    seconds = time.perf_counter() - started
    stats = engine.session.stats
    return {
        "episodes": len(lengths),
        "seconds": seconds,
        "cpu_seconds": time.process_time() - cpu,
        "sampled_tokens": stats.sampled_tokens,
        "tokens_per_second": stats.sampled_tokens / seconds,
        "median_length": sorted(lengths)[len(lengths) // 2],
        "resident_mib": memory,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "python_blocks": blocks,
        "sequences_left": engine.session.num_unfinished,
    }


def _played(engine: RolloutEngine, runner: EpisodeRunner, starts: list[EpisodeStart]) -> list[int]:
    """Lengths of the episodes of one rollout, all of them valid."""
    episodes: list[Episode] = engine.run(lambda session: runner.run(session, starts))
    assert all(episode.is_valid for episode in episodes), "the built-in environment never fails"
    return [len(episode.ids) for episode in episodes]


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20
