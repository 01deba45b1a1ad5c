"""Sample completions of a file of prompts from any checkpoint, on any layout.

    python tools/generate.py --prompts in.jsonl --output out.jsonl --hf-model DIR
    torchrun --nproc-per-node 2 tools/generate.py --prompts in.jsonl --output out.jsonl \\
        --load RUN --tensor-model-parallel-size 2 --samples 4 --rollout-temperature 0.7

A line of the prompts has "prompt" (text), "messages" (a chat) or "prompt_ids".  All other
options are those of pretrain_rl.py: sampling (--rollout-...), the layout, --bf16, the
architecture of --load.  The output appears when it is complete.
"""

from __future__ import annotations

import sys

from megatron_ext.options.first_look import look_first

if __name__ == "__main__":
    # before the imports below, which take seconds
    look_first(sys.argv[1:], tool="generate.py", files=("--prompts",))

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ext.environments.codecs import ModelCodec
from megatron_ext.environments.seeds import derived_seed
from megatron_ext.options.paths import file_problems
from megatron_ext.options.ranges import in_range
from megatron_ext.report.sampling_bar import SamplingBar
from megatron_ext.report.whole_file import check_writable, whole_file
from megatron_ext.rollout.engine import RolloutEngine
from megatron_ext.rollout.prompts import prompt_ids, read_prompts, result
from megatron_ext.rollout.types import Completion, Request, samples_of
from megatron_ext.upstream.arguments import Options
from megatron_ext.upstream.command_line import JobParser
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.generate import (
    generate_on_replicas,
    open_codec,
    open_sampler,
    parse_for_sampling,
)
from megatron_ext.upstream.layout import close_layout
from pretrain_rl import quiet_libraries

SEED = in_range(int, at_least=-(2**63), at_most=2**63 - 1)
MOST_REPORTED = 10
"""Prompts that cannot be sampled, named in an error; the rest is counted."""


def build_parser() -> JobParser:
    """Options of this tool."""
    parser = JobParser(
        description="Sample completions. Options not listed here are those of pretrain_rl.py.",
        allow_abbrev=False,
    )
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL file of prompts")
    parser.add_argument("--output", type=Path, required=True, help="JSONL file to write")
    parser.add_argument(
        "--samples", type=in_range(int, at_least=1), default=1, help="of each prompt (default 1)"
    )
    parser.add_argument("--sampling-seed", type=SEED, default=0, help="same seed, same tokens")
    parser.add_argument(
        "--max-context",
        type=in_range(int, at_least=2),
        help="tokens of prompt and completion (default 2048, or what the checkpoint can)",
    )
    parser.add_argument(
        "--stop", action="append", default=[], help="text that ends a completion; may be repeated"
    )
    parser.add_argument("--logprobs", action="store_true", help="write those of the tokens")
    parser.add_argument(
        "--top-logprobs",
        type=in_range(int, at_least=0),
        default=0,
        help="also of this many others (default 0)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Sample, write the file and say how fast it went; every rank calls it."""
    parser = build_parser()
    own, words = parser.parse_known_args(argv)
    with device_mode():
        try:
            generate(own, words)
        except (OSError, ValueError) as error:
            parser.error(str(error))


def generate(own: argparse.Namespace, words: Sequence[str]) -> None:
    """Completions of one file."""
    if wrong := file_problems({"--prompts": str(own.prompts)}, ["--prompts"]):
        raise ValueError(*wrong)
    records = read_prompts(own.prompts)
    check_writable(own.output, flag="--output")
    options = parse_for_sampling(words, max_context=own.max_context)
    codec = open_codec(options)
    requests = requests_of(own, options, records=records, codec=codec)
    table = byte_table(codec, size=options.megatron.vocab_size) if own.stop else None
    decoder = open_sampler(options)
    engine, layout = RolloutEngine(decoder, options.rollout, token_bytes=table), decoder.layout
    is_shown = decoder.is_driver and layout.dp_rank == 0
    total = -(-len(requests) // layout.dp_size)
    with SamplingBar(total=total, unit="completion", is_shown=is_shown) as bar:
        found = generate_on_replicas(
            engine, requests, layout, on_completion=lambda done: bar.add(len(done.token_ids))
        )
    if layout.is_writer:
        lines = [
            result(
                records[index // own.samples],
                completion,
                text=text_of(completion, codec),
                sample=index % own.samples,
                logprobs=own.logprobs,
            )
            for index, completion in enumerate(found)
        ]
        write(own.output, lines)
        tokens = sum(len(completion.token_ids) for completion in found)
        speed = f"{tokens / bar.seconds:.1f} tokens/s"
        print(f"{own.output}: {len(found)} completions, {tokens} tokens, {speed}")
    close_layout()


def requests_of(
    own: argparse.Namespace,
    options: Options,
    *,
    records: Sequence[dict[str, Any]],
    codec: ModelCodec,
) -> list[Request]:
    """What to sample; `ValueError` names the prompts that the model cannot continue.

    A prompt's draws depend on its ids and on how often it came before, not on the others.
    """
    args = options.megatron
    requests, wrong = [], []
    times = Counter[tuple[int, ...]]()
    for number, record in enumerate(records, start=1):
        try:
            ids = prompt_ids(record, encode=codec.encode)
        except ValueError as error:
            wrong.append(f"prompt {number}: {error}")
            continue
        room = args.seq_length - len(ids)
        request = Request(
            prompt_ids=ids,
            max_new_tokens=max(0, min(options.rollout.rollout_max_new_tokens, room)),
            sampling=options.rollout.sampling,
            seed=derived_seed(own.sampling_seed, *ids),
            sample=own.samples * times[ids],
            stop_ids=codec.stop_ids,
            stop_strings=tuple(own.stop),
            top_logprobs=own.top_logprobs,
        )
        problems = request.problems()
        if room < 1:
            problems.append(f"{len(ids)} tokens leave no room in --max-context {args.seq_length}")
        if ids and not 0 <= min(ids) <= max(ids) < args.vocab_size:
            problems.append(
                f"ids from {min(ids)} to {max(ids)}, but the vocabulary has {args.vocab_size}: use "
                "the checkpoint's tokenizer (--tokenizer-type, --tokenizer-model)"
            )
        wrong += [f"prompt {number}: {problem}." for problem in problems]
        requests += samples_of(request, own.samples)
        times[ids] += 1
    if wrong:
        more = [f"and {len(wrong) - MOST_REPORTED} more"] if len(wrong) > MOST_REPORTED else []
        raise ValueError("\n  ".join([f"{own.prompts}:", *wrong[:MOST_REPORTED], *more]))
    return requests


def byte_table(codec: ModelCodec, *, size: int) -> list[bytes]:
    """What each token contributes to the text; a model may have more of them than its tokenizer."""
    table = codec.token_bytes()
    return [*table, *[b""] * (size - len(table))]


def text_of(completion: Completion, codec: ModelCodec) -> str:
    """What was said, without what ended it."""
    text = codec.decode([t for t in completion.token_ids if t not in codec.stop_ids])
    if isinstance(completion.stopped_by, str):
        text = text.partition(completion.stopped_by)[0]
    return text


def write(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """One JSON object a line."""
    with whole_file(path) as partial, partial.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    quiet_libraries()
    sys.exit(main())
