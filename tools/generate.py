"""Sample completions of a file of prompts from any checkpoint.

    torchrun --nproc-per-node 1 tools/generate.py --prompts in.jsonl --output out.jsonl \\
        --hf-model DIR
    torchrun --nproc-per-node 2 tools/generate.py --prompts in.jsonl --output out.jsonl \\
        --load RUN --tensor-model-parallel-size 2 --samples 4 --rollout-temperature 0.7

A line of the prompts has "prompt" (text), "messages" (a chat) or "prompt_ids".  All other
options are those of pretrain_rl.py: sampling (--rollout-...), the layout, --bf16, the
architecture of --load.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron_ext.data.tokenizer import END_OF_TEXT, ByteTokenizer
from megatron_ext.rollout.engine import RolloutEngine
from megatron_ext.rollout.prompts import prompt_ids, read_prompts, result
from megatron_ext.rollout.token_bytes import token_bytes
from megatron_ext.rollout.types import Request, samples_of
from megatron_ext.upstream.arguments import Options
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.generate import generate_on_replicas, open_decoder
from megatron_ext.upstream.layout import close_layout
from pretrain_rl import quiet_libraries


def build_parser() -> argparse.ArgumentParser:
    """Options of this tool."""
    parser = argparse.ArgumentParser(
        description="Sample completions. Options not listed here are those of pretrain_rl.py.",
        allow_abbrev=False,
    )
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL file of prompts")
    parser.add_argument("--output", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--samples", type=int, default=1, help="of each prompt (default 1)")
    parser.add_argument("--sampling-seed", type=int, default=0, help="same seed, same tokens")
    parser.add_argument(
        "--max-context", type=int, default=2048, help="prompt and completion (default 2048 tokens)"
    )
    parser.add_argument(
        "--stop", action="append", default=[], help="text that ends a completion; may be repeated"
    )
    parser.add_argument("--logprobs", action="store_true", help="write those of the tokens")
    parser.add_argument(
        "--top-logprobs", type=int, default=0, help="also of this many others (default 0)"
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


@dataclass(frozen=True, kw_only=True)
class Coding:
    """Text to ids and back."""

    encode: Callable[[Any], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    stop_ids: frozenset[int]
    table: list[bytes] | None


def generate(own: argparse.Namespace, words: Sequence[str]) -> None:
    """Completions of one file."""
    records = read_prompts(own.prompts)
    options, decoder = open_decoder(words, max_context=own.max_context)
    coding = coding_of(options, needs_bytes=bool(own.stop))
    requests = [
        sample
        for record in records
        for sample in samples_of(
            Request(
                prompt_ids=prompt_ids(record, encode=coding.encode),
                max_new_tokens=options.rollout.rollout_max_new_tokens,
                sampling=options.rollout.sampling,
                seed=own.sampling_seed,
                stop_ids=coding.stop_ids,
                stop_strings=tuple(own.stop),
                top_logprobs=own.top_logprobs,
            ),
            own.samples,
        )
    ]
    engine = RolloutEngine(decoder, options.rollout, token_bytes=coding.table)
    layout, started = decoder.layout, time.perf_counter()
    shows = decoder.is_driver and layout.dp_rank == 0
    with tqdm(total=-(-len(requests) // layout.dp_size), disable=not shows, leave=False) as bar:
        found = generate_on_replicas(
            engine, requests, layout, on_completion=lambda completion: bar.update()
        )
    seconds = time.perf_counter() - started
    if layout.is_writer:
        with own.output.open("w", encoding="utf-8") as file:
            for index, (request, completion) in enumerate(zip(requests, found, strict=True)):
                text = coding.decode([t for t in completion.token_ids if t not in coding.stop_ids])
                line = result(
                    records[index // own.samples],
                    completion,
                    text=text,
                    sample=request.sample,
                    logprobs=own.logprobs,
                )
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        tokens = sum(len(completion.token_ids) for completion in found)
        print(f"{own.output}: {len(found)} completions, {tokens} tokens, {tokens / seconds:.1f}/s")
    close_layout()


def coding_of(options: Options, *, needs_bytes: bool) -> Coding:
    """The tokenizer of --tokenizer-type and --tokenizer-model, or of --hf-model."""
    args = options.megatron
    if args.tokenizer_model is None:
        table = [bytes([byte]) for byte in range(256)] + [b""]
        return Coding(
            encode=ByteTokenizer().encode,
            decode=lambda ids: b"".join(table[i] for i in ids).decode("utf-8", errors="replace"),
            stop_ids=frozenset({END_OF_TEXT}),
            table=table,
        )
    # transformers takes seconds to import: only where it is used
    from megatron_ext.data.hugging_face import load_tokenizer
    from megatron_ext.environments.text import HuggingFaceCodec

    tokenizer = load_tokenizer(args.tokenizer_model)
    codec = HuggingFaceCodec(tokenizer)
    return Coding(
        encode=codec.encode,
        decode=codec.decode,
        stop_ids=codec.stop_ids,
        table=token_bytes(tokenizer) if needs_bytes else None,
    )


if __name__ == "__main__":
    quiet_libraries()
    sys.exit(main())
