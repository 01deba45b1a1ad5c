"""Many episodes of the built-in tasks by the rollout engine: how long they take, what they leave.

A tiny policy of random weights on Megatron plays them, in rollouts of --batch episodes.  It
rambles, so its episodes are longer than those of a policy that has learned something.  Started by
torchrun, one process a core, the processes share the episodes out; CPU time, tokens and memory are
then those of all of them together.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tqdm import tqdm

from megatron_ext.environments.arithmetic import MAX_CONTEXT, ArithmeticSource
from megatron_ext.environments.base import EpisodeLimits, EpisodeStart
from megatron_ext.environments.episode import Episode
from megatron_ext.environments.runner import EpisodeRunner
from megatron_ext.rollout.config import RolloutConfig
from megatron_ext.rollout.engine import RolloutEngine
from megatron_ext.upstream.arguments import parse
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.generate import play_on_replicas
from megatron_ext.upstream.layout import Layout, close_layout, open_layout
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
        sizes = f"--seq-length {MAX_CONTEXT} --global-batch-size {os.environ.get('WORLD_SIZE', 1)}"
        parsed = parse([*TINY.split(), *sizes.split()])
        layout = open_layout(parsed.megatron)
        chunks = build_chunks(parsed.megatron, layout, wrap=False)
        decoder = MegatronDecoder(parsed.megatron, layout, chunks)
        engine = RolloutEngine(decoder, RolloutConfig(rollout_slots=options.slots))
        figures = measure(engine, options, layout)
        close_layout()
    return figures


def measure(engine: RolloutEngine, options: Namespace, layout: Layout) -> dict[str, object]:
    """Time, tokens, and the memory after the warm-up and at the end."""
    source = ArithmeticSource()
    limits = EpisodeLimits(max_new_tokens=MAX_CONTEXT, max_context=MAX_CONTEXT)
    runner = EpisodeRunner(source.environment, limits=limits)
    lengths: list[int] = []
    memory: dict[str, float] = {}
    blocks: dict[str, int] = {}
    cpu, started = time.process_time(), time.perf_counter()
    with tqdm(
        total=options.episodes, unit="episode", leave=False, disable=not layout.is_writer
    ) as bar:
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
            lengths += _lengths(play_on_replicas(engine, runner, starts, layout))
            bar.update(len(starts))
            moment = "warm" if len(lengths) < options.episodes else "end"
            if moment == "end" or len(lengths) <= max(WARM_UP * options.episodes, options.batch):
                gc.collect()
                memory[moment], blocks[moment] = _resident_mib(), sys.getallocatedblocks()
    seconds = time.perf_counter() - started
    found = {
        "cpu_seconds": time.process_time() - cpu,
        "sampled_tokens": engine.session.stats.sampled_tokens,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "sequences_left": engine.session.num_unfinished,
    }
    total = _summed(found)
    return {
        "episodes": len(lengths),
        "processes": layout.dp_size,
        "seconds": seconds,
        "tokens_per_second": total["sampled_tokens"] / seconds,
        "median_length": sorted(lengths)[len(lengths) // 2],
        **total,
        "resident_mib": _summed(memory),
        "python_blocks": _summed(blocks),
    }


def _summed(figures: Mapping[str, float]) -> dict[str, float]:
    """The figures of all processes together."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, figures)
    return {name: sum(part[name] for part in parts) for name in figures}


def _lengths(episodes: list[Episode]) -> list[int]:
    """Of the episodes of one rollout, all of them valid."""
    assert all(episode.is_valid for episode in episodes), "the built-in environment never fails"
    return [len(episode.ids) for episode in episodes]


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20
