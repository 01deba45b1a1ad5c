"""A two-layer transformer of plain torch that the engine drives, and the same without cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.rollout.attention import CacheIndex, cached_attention, write
from megatron_ext.rollout.cache import CacheField, SlotCache
from megatron_ext.rollout.step_plan import StepPlan

GROUPS, HEADS_OF_GROUP, WIDTH = 2, 2, 4
HIDDEN = GROUPS * HEADS_OF_GROUP * WIDTH


class ToyDecoder:
    """Random weights in float64; positions are learned vectors: a wrong one changes everything."""

    def __init__(self, *, vocab_size: int = 19, max_context: int = 96, layers: int = 2) -> None:
        self.vocab_size, self.max_context, self.layers = vocab_size, max_context, layers
        self.plans: list[StepPlan] = []
        self.cache = SlotCache(
            [CacheField("key", GROUPS, WIDTH), CacheField("value", GROUPS, WIDTH)],
            num_layers=layers,
            dtype=torch.float64,
            device=torch.device("cpu"),
        )
        self.set_weights(0)

    def set_weights(self, seed: int) -> None:
        """Other weights, as if the model had been trained."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.4

        self.tokens, self.places = normal(self.vocab_size, HIDDEN), normal(self.max_context, HIDDEN)
        self.qkv = [normal(2 * HIDDEN, HIDDEN) for _ in range(self.layers)]
        self.up = [normal(HIDDEN, HIDDEN) for _ in range(self.layers)]
        self.head = normal(self.vocab_size, HIDDEN) * 2

    def forward(self, plan: StepPlan) -> Tensor:
        """Logits of the wanted tokens."""
        self.plans.append(StepPlan.from_integers([*plan.to_integers(), 7, 7]))
        if plan.num_slots < self.cache.num_slots:
            self.cache.copy(plan.copies)
            self.cache.resize(plan.num_slots, plan.capacity)
        else:
            self.cache.resize(plan.num_slots, plan.capacity)
            self.cache.copy(plan.copies)
        index = CacheIndex.of(plan, dtype=torch.float64, device=torch.device("cpu"))
        x = self.tokens[plan.tokens] + self.places[plan.positions]
        for layer in range(self.layers):
            keys, values = self.cache.layer(layer)
            q, k, v = self._qkv(x, layer)
            write(keys, k, index)
            write(values, v, index)
            x = x + cached_attention(q, keys, values, index=index, softmax_scale=0.5)
            x = x + torch.tanh(x @ self.up[layer].T)
        self.cache.copy(plan.later_copies)
        return (x @ self.head.T)[plan.wanted]

    def run(self, drive: Callable[[], object]) -> object:
        """The one rank drives itself."""
        self.cache.drop()
        result = drive()
        self.cache.drop()
        return result

    def is_any_working(self, is_working: bool) -> bool:
        """There is no other replica."""
        return is_working

    def full_logits(self, tokens: list[int]) -> Tensor:
        """Logits [tokens, vocabulary] of one sequence, computed from scratch."""
        x = self.tokens[tokens] + self.places[: len(tokens)]
        for layer in range(self.layers):
            q, k, v = self._qkv(x, layer)
            out = F.scaled_dot_product_attention(
                q.permute(1, 2, 0, 3),
                k.permute(1, 0, 2)[:, None].expand(-1, HEADS_OF_GROUP, -1, -1),
                v.permute(1, 0, 2)[:, None].expand(-1, HEADS_OF_GROUP, -1, -1),
                is_causal=True,
                scale=0.5,
            )
            x = x + out.permute(2, 0, 1, 3).flatten(1)
            x = x + torch.tanh(x @ self.up[layer].T)
        return x @ self.head.T

    def _qkv(self, x: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        mixed = (x @ self.qkv[layer].T).view(len(x), GROUPS, HEADS_OF_GROUP + 2, WIDTH)
        return mixed[:, :, :-2], mixed[:, :, -2], mixed[:, :, -1]
