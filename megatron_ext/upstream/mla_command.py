"""The command line of tools/convert_checkpoint.py --to mla."""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path

import torch
from megatron.training.argument_utils import ArgumentGroupFactory

from megatron_ext.files.lock import hold_target
from megatron_ext.mla.config import MLAConfig
from megatron_ext.mla.presets import preset_options
from megatron_ext.mla.problems import conversion_notices, conversion_problems
from megatron_ext.mla.sizes import converted_cache, original_cache
from megatron_ext.options.ranges import in_range
from megatron_ext.upstream.command_line import HelpFormatter, JobParser
from megatron_ext.upstream.convert_target import is_hf
from megatron_ext.upstream.cuda_on_cpu import resident_peak_bytes
from megatron_ext.upstream.layout import close_layout
from megatron_ext.upstream.mla_convert import convert_to_mla
from megatron_ext.upstream.mla_job import MlaJob
from megatron_ext.weights.checks import open_checkpoint

_JOB = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_")
"""What torchrun tells its processes: a program they start is no rank."""


def is_to_mla(words: Sequence[str]) -> bool:
    """Whether a command line of the tool asks for latent attention."""
    pairs = itertools.pairwise(words)
    return "--to=mla" in words or any(pair == ("--to", "mla") for pair in pairs)


def build_parser() -> JobParser:
    """Ours; what it does not know goes to Megatron's, for the layout of calibration."""
    parser = JobParser(
        prog="convert_checkpoint.py",
        description="Convert multi-head or grouped-query attention to latent attention (MHA2MLA): "
        "a Hugging Face directory, GGUF file or torch_dist checkpoint to a Hugging Face directory "
        "with a report. Under torchrun the ranks share the layers; Megatron's layout flags "
        "(--tensor-model-parallel-size ...) are for calibration and evaluation. Started again "
        "after an interruption it goes on with the layers that are left.",
        allow_abbrev=False,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("input", type=Path, help="checkpoint to convert")
    parser.add_argument("output", type=Path, help="folder to create")
    parser.add_argument("--to", choices=("mla",), required=True, help="latent attention")
    parser.add_argument(
        "--megatron-output", type=Path, help="folder for a torch_dist checkpoint as well"
    )
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), help="type of the weights (default: as it is)"
    )
    parser.add_argument(
        "--evaluation-text",
        type=Path,
        help="UTF-8 text on which perplexity is measured before and after (default none); not "
        "the calibration's",
    )
    parser.add_argument(
        "--evaluation-window",
        type=in_range(int, at_least=2),
        default=2048,
        help="tokens of a window of that text",
    )
    parser.add_argument(
        "--max-windows", type=in_range(int, at_least=1), help="only the first windows (default all)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="say what fits and what it would save; write nothing"
    )
    parser.add_argument("--peak", action="store_true", help="print time and peak memory at the end")
    ArgumentGroupFactory(MLAConfig).build_group(parser, title="latent attention")
    parser.add_argument(
        "--layout",
        dest="mla_layout",
        choices=("paper", "deepseek"),
        default=argparse.SUPPRESS,
        help="short for --mla-layout",
    )
    return parser


def parse_command(words: Sequence[str]) -> tuple[argparse.Namespace, MLAConfig, list[str]]:
    """Options, config, and the words for Megatron; ends with status 2 on a bad value."""
    parser = build_parser()
    method = parser.parse_known_args(words)[0].low_rank_method
    parser.set_defaults(**preset_options(method))
    options, rest = parser.parse_known_args(words)
    try:
        config = MLAConfig(**{f.name: getattr(options, f.name) for f in fields(MLAConfig)})
    except ValueError as error:
        parser.error(str(error))
    return options, config, rest


def main(words: Sequence[str], *, say: Callable[[str], object]) -> None:
    """Convert, or end with status 2 and all that is against it.

    say: told of what is done, line by line, on the first rank.
    """
    started = time.perf_counter()
    options, config, rest = parse_command(words)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    job = MlaJob(
        source=options.input,
        target=options.output,
        config=config,
        words=rest,
        dtype=dtypes.get(options.dtype),
        evaluation_text=options.evaluation_text,
        evaluation_window=options.evaluation_window,
        max_windows=options.max_windows,
        say=say,
    )
    try:
        if options.dry_run:
            show(job)
            return
        _check_outputs(options)
        is_writer = int(os.environ.get("RANK", "0")) == 0
        what = f"the output {options.output}"
        with hold_target(options.output, what=what) if is_writer else nullcontext():
            convert_to_mla(job)
            if options.megatron_output and is_writer:
                _to_megatron(options.output, options.megatron_output)
        close_layout()
        if options.peak:
            seconds, peak = time.perf_counter() - started, resident_peak_bytes() / 2**30
            say(f"{seconds:.1f} s, peak memory {peak:.2f} GiB")
    except (OSError, ValueError) as error:
        build_parser().error(str(error))


def show(job: MlaJob) -> None:
    """What the conversion of a checkpoint's attention would save.

    Raises:
        ValueError: it cannot be done; all reasons.
    """
    if not job.source.exists() or not is_hf(job.source):
        raise ValueError(
            f"--dry-run of {job.source}: it looks at a Hugging Face directory or GGUF file only. "
            "Convert the torch_dist checkpoint to one first."
        )
    architecture = open_checkpoint(job.source).architecture
    if wrong := conversion_problems(job.config, architecture):
        raise ValueError("\n  ".join(wrong))
    before = original_cache(architecture).total
    if job.config.rope_pairs < 0:
        job.say(f"cache of a token and layer: {before} numbers -> {job.config.cache_ratio:.2%}")
        return
    after = converted_cache(job.config, architecture)
    job.say(
        f"cache of a token and layer: {before} numbers -> {after.total} "
        f"({after.total / before:.2%}): {after.by_head} by KV head, {after.shared} shared"
    )
    for notice in conversion_notices(job.config, architecture):
        job.say(f"note: {notice}")


def _check_outputs(options: argparse.Namespace) -> None:
    """Raise ValueError for what would fail after the work."""
    other = options.megatron_output
    if other is not None and other.exists() and (not other.is_dir() or any(other.iterdir())):
        raise ValueError(
            f"--megatron-output {other} exists and is not empty. Give another folder, or delete it."
        )
    text = options.evaluation_text
    if text is not None and not text.is_file():
        raise ValueError(f"--evaluation-text {text} is no file. Check the path.")
    for data in options.calibration_data:
        if not Path(data).is_file():
            raise ValueError(f"--calibration-data {data} is no file. Check the path.")


def _to_megatron(source: Path, target: Path) -> None:
    """The same tool in a process that is no rank.

    Raises:
        ValueError: it failed.
    """
    tool = Path(__file__).resolve().parents[2] / "tools" / "convert_checkpoint.py"
    environment = {n: v for n, v in os.environ.items() if not n.startswith(_JOB)}
    command = [sys.executable, str(tool), str(source), str(target), "--transformer-impl", "local"]
    if subprocess.run(command, env=environment, check=False).returncode != 0:
        raise ValueError(
            f"{source} is complete, but --megatron-output {target} could not be written: convert "
            "it again from there."
        )
