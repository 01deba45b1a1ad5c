"""`logprobs`: peak memory and time of log-probabilities in tiles against full logits.

Each way runs forward and backward in a child process of its own; the peak is what its resident
memory grew by (Linux), so it counts everything, gradients included.
"""

from __future__ import annotations

import multiprocessing
import time
from argparse import ArgumentParser, Namespace
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.logprobs.chunked import selected_logprobs

WAYS = ("full logits", "tiles")


def add_arguments(parser: ArgumentParser) -> None:
    """Options of the subcommand."""
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab-size", type=int, default=49_152)
    parser.add_argument("--hidden-size", type=int, default=576)
    parser.add_argument("--logprob-chunk-size", type=int, default=1024)


def run(options: Namespace) -> dict[str, object]:
    """Peak bytes, CPU seconds and largest differences of the two ways, and their ratios."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        found = dict(zip(WAYS, pool.map(measure, WAYS, [options] * len(WAYS)), strict=True))
    full, tiles = (found[way] for way in WAYS)
    return {
        "peak_bytes": {way: of_way["peak"] for way, of_way in found.items()},
        "seconds": {way: of_way["seconds"] for way, of_way in found.items()},
        "peak_ratio": tiles["peak"] / full["peak"],
        "time_ratio": tiles["seconds"] / full["seconds"],
        "value_difference": float(abs(tiles["logprobs"] - full["logprobs"]).max()),
        "gradient_difference": float(
            abs(tiles["gradient"] - full["gradient"]).max() / abs(full["gradient"]).max()
        ),
    }


def measure(way: str, options: Namespace) -> dict[str, Any]:
    """Forward and backward of one way in this process; arrays, which outlive it."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    width = options.hidden_size
    hidden_TD = torch.randn(options.tokens, width, generator=generator).requires_grad_()
    weight_VD = torch.randn(options.vocab_size, width, generator=generator).mul_(width**-0.5)
    weight_VD.requires_grad_()
    labels_T = torch.randint(options.vocab_size, (options.tokens,), generator=generator)
    before = _restart_peak()
    started = time.process_time()
    logprobs_T = _logprobs(way, hidden_TD, weight_VD, labels_T, options)
    logprobs_T.mean().backward()
    seconds = time.process_time() - started
    assert hidden_TD.grad is not None
    return {
        "peak": _status("VmHWM") - before,
        "seconds": seconds,
        "logprobs": logprobs_T.detach().numpy(),
        "gradient": hidden_TD.grad.numpy(),
    }


def _logprobs(
    way: str, hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, options: Namespace
) -> Tensor:
    if way == "tiles":
        return selected_logprobs(
            hidden_TD,
            weight_VD,
            labels_T,
            vocab_size=options.vocab_size,
            chunk_size=options.logprob_chunk_size,
        ).logprobs
    return -F.cross_entropy(hidden_TD @ weight_VD.T, labels_T, reduction="none")


def _restart_peak() -> int:
    """Bytes resident now, from which the peak counts."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    """A size in bytes that Linux keeps about this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}: this measurement needs Linux.")
