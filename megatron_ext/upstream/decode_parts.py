"""What decoding needs to know about Megatron's chunks before the first step.

Legend: N wanted tokens, V vocabulary columns of this rank, S positions, W width of a head.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megatron_ext.rollout.cache import CacheField
from megatron_ext.upstream.decode_attention import AttentionDecoder, Rotary, attention_decoder

_GATHERED_BYTES = 2**26
"""Logits that the driver receives at a time."""


def rotary_table(model: GPTModel, *, length: int, dtype: torch.dtype) -> Rotary | None:
    """Rotary embedding of the first positions, which all layers share; None without."""
    decoders = _decoders([model])
    return decoders[0].rotary(model, length=length, dtype=dtype) if decoders else None


def cache_fields(models: Sequence[GPTModel]) -> list[CacheField]:
    """What each layer of this rank keeps of a token."""
    decoders = _decoders(models)
    return decoders[0].fields if decoders else []


def _decoders(models: Sequence[GPTModel]) -> list[AttentionDecoder]:
    layers: list[Any] = [layer for model in models for layer in model.decoder.layers]
    return [d for layer in layers if (d := attention_decoder(layer.self_attention)) is not None]


def refuse_undecodable(args: Namespace, models: Sequence[GPTModel]) -> None:
    """Raise `ValueError` with all that keeps a model from decoding as the trainer computes it."""
    config = models[0].config
    wrong = []
    if args.context_parallel_size > 1:
        wrong.append(
            f"--context-parallel-size {args.context_parallel_size}: decoding needs whole sequences "
            "on every rank. Use 1."
        )
    if models[0].position_embedding_type not in ("rope", "yarn", "learned_absolute", "none"):
        wrong.append(
            f"--position-embedding-type {models[0].position_embedding_type}: decoding knows rope, "
            "yarn, learned_absolute and none."
        )
    layers: list[Any] = [layer for model in models for layer in model.decoder.layers]
    others = {
        type(layer.self_attention).__name__
        for layer in layers
        if attention_decoder(layer.self_attention) is None
    }
    if others:
        wrong.append(
            f"attention {', '.join(sorted(others))} has no decoder: only attention that keeps keys "
            "and values, or latents, does."
        )
    if len({tuple(decoder.fields) for decoder in _decoders(models)}) > 1:
        wrong.append("layers keep different things of a token: they must have equal heads.")
    if config.num_moe_experts and config.moe_expert_capacity_factor is not None:
        wrong.append(
            f"--moe-expert-capacity-factor {config.moe_expert_capacity_factor}: which tokens an "
            "expert drops depends on the batch, so the log-probabilities of sampler and trainer "
            "cannot agree. Leave it out."
        )
    if config.num_moe_experts and config.moe_input_jitter_eps is not None:
        wrong.append(
            f"--moe-input-jitter-eps {config.moe_input_jitter_eps}: routing would be random while "
            "decoding. Leave it out."
        )
    if wrong:
        raise ValueError("the model cannot sample:\n  " + "\n  ".join(wrong))


def rank_of_driver(is_driver: bool, *, group: dist.ProcessGroup, device: torch.device) -> int:
    """Global rank of the one member of the group that is the driver.  Collective."""
    if group.size() == 1:
        return dist.get_rank()
    mine = torch.tensor([dist.get_rank() if is_driver else -1], device=device)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=group)
    return int(mine)


def gather_columns(logits_NV: Tensor, *, group: dist.ProcessGroup) -> Tensor | None:
    """Logits of all columns on the group's first rank, None on the others.

    A limited number of rows at a time: the largest buffer is the result itself.
    """
    rows, columns = logits_NV.shape
    is_first = group.rank() == 0
    whole = logits_NV.new_empty(rows, group.size(), columns) if is_first else None
    count = max(1, _GATHERED_BYTES // (group.size() * columns * logits_NV.element_size()))
    for start in range(0, rows, count):
        part = logits_NV[start : start + count].contiguous()
        parts = [torch.empty_like(part) for _ in range(group.size())] if is_first else None
        dist.gather(part, parts, group=group, group_dst=0)
        if whole is not None and parts is not None:
            torch.stack(parts, dim=1, out=whole[start : start + count])
    return None if whole is None else whole.flatten(1)
