"""Sampling from a checkpoint: Hugging Face or GGUF (--hf-model) or Megatron (--load)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist

from megatron_ext.rollout.engine import RolloutEngine
from megatron_ext.rollout.types import Completion, Request
from megatron_ext.upstream.arguments import Options
from megatron_ext.upstream.evaluate import fill_model, parse_for_evaluation
from megatron_ext.upstream.layout import Layout, open_layout
from megatron_ext.upstream.model import build_chunks
from megatron_ext.upstream.rollout import MegatronDecoder


def open_decoder(words: Sequence[str], *, max_context: int) -> tuple[Options, MegatronDecoder]:
    """A model that only samples, from the checkpoint that the words name.  Collective.

    words: options of pretrain_rl.py; what only training needs may be left out.
    max_context: longest sequence, prompt included.

    Raises:
        ValueError: there is no such checkpoint, or it does not fit the words.
    """
    lengths = ["--max-position-embeddings", str(max_context)]
    options = parse_for_evaluation([*words, *lengths], seq_length=max_context)
    layout = open_layout(options.megatron)
    chunks = build_chunks(options.megatron, layout, wrap=False)
    fill_model(options, layout, chunks=chunks)
    return options, MegatronDecoder(options.megatron, layout, chunks)


def generate_on_replicas(
    engine: RolloutEngine,
    requests: Sequence[Request],
    layout: Layout,
    *,
    version: int = 0,
    on_completion: Callable[[Completion], object] | None = None,
) -> list[Completion]:
    """Completions of all requests, in order, on every rank; replicas share them out.  Collective.

    Neighbours go to different replicas, samples of one prompt to the same one, so that they share
    its prefill.  Tickets are those of the replica that sampled.
    on_completion: told of each of a replica's own as it ends, on the rank that drives it.
    """
    order: dict[tuple[int, ...], int] = {}
    owners = [order.setdefault(r.prompt_ids, len(order)) % layout.dp_size for r in requests]
    mine = [r for r, owner in zip(requests, owners, strict=True) if owner == layout.dp_rank]
    found = engine.generate(mine, version=version, on_completion=on_completion)
    parts: list[list[Completion] | None] = [None] * layout.dp_size
    dist.all_gather_object(parts, found, group=layout.groups.dp)
    iterators = [iter(part or []) for part in parts]
    return [next(iterators[owner]) for owner in owners]
