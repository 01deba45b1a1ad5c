"""No combination of sizes ends in a traceback, and what is accepted is a model that runs."""

from __future__ import annotations

import contextlib
import io
import os
import random
from argparse import Namespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.upstream.arguments import parse
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.layout import open_layout
from megatron_ext.upstream.model import build_chunks
from tests.ranks import RankPool
from tests.upstream.cpu_runs import SMALL

sizes = st.integers(-1, 9)
NUMBERS = st.sampled_from(["0", "-1", "nan", "inf", "-inf", "1e308", "1e-320", "0.5", str(10**20)])
ODD_LINES = st.fixed_dictionaries(
    {},
    optional={
        "lr": NUMBERS,
        "seed": NUMBERS,
        "adam-eps": NUMBERS,
        "rotary-base": NUMBERS,
        "rollout-temperature": NUMBERS,
        "tensor-model-parallel-size": sizes,
        "pipeline-model-parallel-size": sizes,
        "expert-model-parallel-size": sizes,
        "expert-tensor-parallel-size": sizes,
        "context-parallel-size": st.integers(1, 2),
        "num-layers": sizes,
        "hidden-size": st.integers(0, 70),
        "num-attention-heads": sizes,
        "num-query-groups": sizes,
        "kv-channels": sizes,
        "ffn-hidden-size": st.integers(0, 70),
        "num-experts": sizes,
        "moe-router-topk": sizes,
        "moe-ffn-hidden-size": sizes,
        "seq-length": st.integers(0, 40),
        "max-position-embeddings": st.integers(0, 40),
        "micro-batch-size": sizes,
        "global-batch-size": sizes,
        "train-iters": sizes,
        "lr-warmup-iters": sizes,
        "vocab-size": st.integers(-1, 600),
        "padded-vocab-size": st.integers(-1, 600),
        "make-vocab-size-divisible-by": sizes,
        "num-layers-per-virtual-pipeline-stage": sizes,
        "num-virtual-stages-per-pipeline-rank": sizes,
        "microbatch-group-size-per-virtual-pipeline-stage": sizes,
        "decoder-first-pipeline-num-layers": sizes,
        "decoder-last-pipeline-num-layers": sizes,
        "pipeline-model-parallel-layout": st.sampled_from(["Et|L", "Ett|tL", "x", "", "E|t*3|L"]),
        "max-tokens-per-microbatch": st.integers(-1, 50),
        "moe-layer-freq": st.sampled_from(["1", "0", "[1,0]", "[1]*2", "(", "a"]),
        "position-embedding-type": st.sampled_from(["rope", "yarn", "none", "mrope", "relative"]),
        "recompute-num-layers": sizes,
        "recompute-granularity": st.sampled_from(["full", "selective"]),
    },
)
SWITCHES = st.sets(
    st.sampled_from(
        [
            *("group-query-attention", "swiglu", "sequence-parallel", "bf16", "fp16", "packing"),
            *("multi-latent-attention", "use-distributed-optimizer", "overlap-param-gather"),
            *("pad-rows-to-capacity", "account-for-loss-in-pipeline-split", "squared-relu"),
            *("scatter-gather-pipeline-tensors", "qk-layernorm", "moe-shared-expert-overlap"),
        ]
    ),
    max_size=5,
)


@settings(max_examples=300, deadline=None)
@given(values=ODD_LINES, switches=SWITCHES, world_size=st.integers(1, 9))
def test_no_command_line_ends_in_a_traceback(values, switches, world_size):
    words = [*SMALL.split(), *(f"--{name}={value}" for name, value in values.items())]
    words += [f"--{switch}" for switch in switches]
    before, message = dict(os.environ), io.StringIO()
    try:
        os.environ |= {"RANK": "0", "WORLD_SIZE": str(world_size)}
        with device_mode(), contextlib.redirect_stderr(message):
            args = parse(words).megatron
        assert args.data_parallel_size >= 1
        assert args.global_batch_size % (args.micro_batch_size * args.data_parallel_size) == 0
    except SystemExit as stop:
        assert stop.code == 2
        assert "pretrain_rl.py: error: \n  " in message.getvalue()
    finally:
        os.environ.clear()
        os.environ.update(before)


def odd_sizes(choice: random.Random) -> list[str]:
    """Sizes that often fit together."""
    pick = choice.choice
    words = [
        *("--num-layers", str(pick([1, 2, 3]))),
        *("--hidden-size", str(pick([16, 24, 30, 32]))),
        *("--num-attention-heads", str(pick([1, 2, 3, 4]))),
        *("--ffn-hidden-size", str(pick([1, 7, 48]))),
        *("--seq-length", str(pick([1, 5, 24]))),
        *("--vocab-size", str(pick([1, 250, 257]))),
        *("--position-embedding-type", pick(["rope", "none", "yarn", "learned_absolute"])),
        *("--normalization", pick(["RMSNorm", "LayerNorm"])),
    ]
    if choice.random() < 0.4:
        groups = str(pick([1, 2, 3]))
        words += ["--group-query-attention", "--num-query-groups", groups]
    if choice.random() < 0.4:
        words += ["--num-experts", str(pick([1, 2, 5])), "--moe-router-topk", str(pick([1, 2]))]
        words += pick([[], ["--moe-router-pre-softmax"], ["--moe-layer-freq", "2"]])
    return words + pick([[], ["--qk-layernorm"], ["--bf16"], ["--kv-channels", "6"]])


def build_what_is_accepted(seed: int, *, examples: int) -> tuple[int, list[str]]:
    """How many command lines are accepted, and those whose model then does not run."""
    choice, layout, accepted, failed = random.Random(seed), None, 0, []
    with device_mode():
        for _ in range(examples):
            words = [*SMALL.split(), *odd_sizes(choice)]
            try:
                args = parse(words).megatron
            except SystemExit:
                continue
            accepted += 1
            layout = layout or open_layout(args)
            try:
                run_once(args, build_chunks(args, layout, wrap=False)[0])
            except (
                ArithmeticError,
                AssertionError,
                LookupError,
                RuntimeError,
                ValueError,
            ) as error:
                failed.append(f"{' '.join(words)}: {type(error).__name__}: {error}")
    return accepted, failed


def run_once(args: Namespace, chunk: object) -> None:
    """A forward and backward of one row of full length."""
    tokens = torch.arange(args.seq_length)[None] % args.vocab_size
    positions = torch.arange(args.seq_length)[None]
    losses = chunk(tokens, positions, None, labels=tokens)  # type: ignore[operator]
    losses.mean().backward()
    assert losses.isfinite().all()


def test_the_model_of_an_accepted_command_line_runs(ranks: RankPool):
    [(accepted, failed)] = ranks(1).run(build_what_is_accepted, 0, examples=60, timeout=110)
    assert accepted >= 10
    assert not failed, "\n".join(failed)
