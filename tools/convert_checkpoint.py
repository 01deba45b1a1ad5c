"""Convert checkpoints: Hugging Face or GGUF to Megatron's torch_dist, and back, and to MLA.

    python tools/convert_checkpoint.py Llama-2-7b-hf megatron/llama
    python tools/convert_checkpoint.py megatron/llama Llama-2-7b-again
    python tools/convert_checkpoint.py tiny.gguf tiny-hf --to hf --dtype bf16
    python tools/convert_checkpoint.py Llama-2-7b-hf Llama-2-7b-mla --to mla --layout deepseek \\
        --cache-ratio 0.25 --calibration-data text.txt

The kind of the input decides the direction; runs take the output by --load megatron/llama.
One tensor is held at a time, and one layer on the way to latent attention (docs/mha2mla.md;
--to mla --help lists its options).
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from megatron_ext.files.lock import hold_target
from megatron_ext.options.ranges import in_range
from megatron_ext.upstream import mla_command
from megatron_ext.upstream.convert import to_megatron
from megatron_ext.upstream.convert_hf import hf_again, to_hf
from megatron_ext.upstream.convert_target import Conversion, is_hf
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.cuda_on_cpu import resident_peak_bytes
from megatron_ext.upstream.machine import this_machine

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def main(argv: Sequence[str] | None = None) -> None:
    """Convert one checkpoint."""
    started = time.perf_counter()
    words = sys.argv[1:] if argv is None else list(argv)
    if mla_command.is_to_mla(words):
        with device_mode():
            mla_command.main(words, say=print)
        return
    parser = build_parser()
    options = parser.parse_args(words)
    try:
        with device_mode():
            conversion = plan(options)
            if options.dry_run:
                show(conversion)
            else:
                with hold_target(options.output, what=f"the output {options.output}"):
                    run(conversion)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if options.peak:
        seconds, peak = time.perf_counter() - started, resident_peak_bytes() / 2**30
        print(f"{seconds:.1f} s, peak memory {peak:.2f} GiB")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="convert_checkpoint.py",
        description="Hugging Face or GGUF checkpoints to Megatron's torch_dist format, and back.",
    )
    parser.add_argument(
        "input",
        type=Path,
        help="Hugging Face directory, GGUF file, or folder of a torch_dist checkpoint (the one "
        "that --load takes, or one iteration's)",
    )
    parser.add_argument("output", type=Path, help="folder to create")
    parser.add_argument(
        "--to",
        choices=("megatron", "hf", "mla"),
        help="what the output is (default: megatron for a Hugging Face or GGUF input, else hf; hf "
        "of such an input writes it again as plain safetensors); "
        "mla has options of its own: --to mla --help",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list names, shapes and bytes; write nothing"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="type of the weights (default: as it is)")
    parser.add_argument(
        "--max-shard-size",
        type=num_bytes,
        default="5GB",
        metavar="SIZE",
        help="largest safetensors file, such as 500MB (default 5GB)",
    )
    parser.add_argument(
        "--ckpt-step",
        type=in_range(int, at_least=0),
        help="step of a torch_dist checkpoint to convert",
    )
    parser.add_argument(
        "--like",
        type=Path,
        metavar="DIR",
        help="Hugging Face directory whose config.json and tokenizer belong to the torch_dist "
        "checkpoint (default: those kept when it was converted, else made from its flags)",
    )
    parser.add_argument(
        "--drop-mtp-layers",
        action="store_true",
        help="leave out multi-token-prediction layers instead of refusing them",
    )
    parser.add_argument(
        "--transformer-impl",
        choices=("local", "transformer_engine"),
        default="transformer_engine" if this_machine().has_transformer_engine else "local",
        help="layers of the runs that will load the torch_dist checkpoint (default: this "
        "machine's, %(default)s)",
    )
    parser.add_argument("--peak", action="store_true", help="print time and peak memory at the end")
    return parser


def num_bytes(text: str) -> int:
    """A size such as 500MB or 5GB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMG]B|)", text.upper())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 500MB or 5GB.")
    return int(float(match[1]) * _UNITS[match[2]])


def plan(options: argparse.Namespace) -> Conversion:
    """What is to be done; raises ValueError if it cannot be."""
    dtype = DTYPES.get(options.dtype)
    if not options.input.exists():
        raise ValueError(f"{options.input} does not exist. Check the path.")
    is_source_hf = is_hf(options.input)
    if options.to == "megatron" and not is_source_hf:
        raise ValueError(
            f"--to megatron: {options.input} is not in Hugging Face's format and becomes hf. Leave "
            "--to out."
        )
    if is_source_hf and options.to == "hf":
        return hf_again(
            options.input,
            options.output,
            dtype=dtype,
            drop_mtp=options.drop_mtp_layers,
            max_file_bytes=options.max_shard_size,
        )
    if is_source_hf:
        return to_megatron(
            options.input,
            options.output,
            implementation=options.transformer_impl,
            dtype=dtype,
            drop_mtp=options.drop_mtp_layers,
        )
    return to_hf(
        options.input,
        options.output,
        step=options.ckpt_step,
        like=options.like,
        dtype=dtype,
        max_file_bytes=options.max_shard_size,
    )


def show(conversion: Conversion) -> None:
    """List what would be written."""
    for name, info in conversion.tensors.items():
        kind = str(info.dtype).removeprefix("torch.")
        print(f"{name}  {list(info.shape)}  {kind}  {info.num_bytes}")
    print(f"{len(conversion.tensors)} tensors, {conversion.num_bytes} bytes")


def run(conversion: Conversion) -> None:
    """Convert with a progress bar."""
    with tqdm(total=conversion.num_bytes, unit="B", unit_scale=True, leave=False) as bar:
        conversion.run(bar.update)


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    warnings.filterwarnings("ignore", module="megatron")
    warnings.filterwarnings("ignore", module="torch.distributed")
    sys.exit(main())
