"""A generator that samples what a script says, for tests of what drives it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_ext.environments.arithmetic_demonstrations import expert_turn
from megatron_ext.environments.arithmetic_tasks import TOKENIZER
from megatron_ext.rollout.types import Completion, Request

Policy = Callable[[Sequence[int]], Sequence[int]]


def expert(context: Sequence[int]) -> list[int]:
    """The next turn of one who knows how to use the calculator."""
    return TOKENIZER.encode(expert_turn(TOKENIZER.decode(context)))


@dataclass
class _Sequence:
    request: Request
    context: list[int]
    end: int
    """Length of the context at which the budget is used up."""
    is_running: bool = True


@dataclass
class ScriptedGenerator:
    """Keeps to the protocol `TokenGenerator`; turns end in a shuffled order, some steps with none.

    Log-prob of a token: minus its place in the context.  Version: the number of the step.
    """

    policy: Policy = expert
    seed: int = 0
    requests: list[Request] = field(default_factory=list)
    sequences: dict[int, _Sequence] = field(default_factory=dict)
    num_steps: int = 0
    vocab_size: int = TOKENIZER.size

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def submit(self, request: Request, *, keep: bool = False) -> int:
        """Queue a sequence."""
        assert keep and not request.problems()
        if max(request.prompt_ids) >= TOKENIZER.size:
            raise ValueError("a token is not in the vocabulary")
        self.requests.append(request)
        ticket = len(self.requests)
        context = list(request.prompt_ids)
        end = len(context) + request.max_new_tokens
        self.sequences[ticket] = _Sequence(request, context, end)
        return ticket

    def extend(self, ticket: int, token_ids: Sequence[int], *, max_new_tokens: int) -> None:
        """Go on with a sequence."""
        sequence = self.sequences[ticket]
        assert not sequence.is_running and max_new_tokens > 0
        sequence.context += token_ids
        sequence.end = len(sequence.context) + max_new_tokens
        sequence.is_running = True

    def release(self, ticket: int) -> None:
        """Forget a sequence."""
        del self.sequences[ticket]

    def step(self) -> list[Completion]:
        """End about half of the running turns."""
        self.num_steps += 1
        running = [ticket for ticket, s in self.sequences.items() if s.is_running]
        self._rng.shuffle(running)
        return [self._completion(ticket) for ticket in running[: -(-len(running) // 2)]]

    def _completion(self, ticket: int) -> Completion:
        sequence = self.sequences[ticket]
        sequence.is_running = False
        start = len(sequence.context)
        sampled = list(self.policy(sequence.context))[: sequence.end - start]
        sequence.context += sampled
        has_stopped = bool(sampled) and sampled[-1] in sequence.request.stop_ids
        return Completion(
            ticket=ticket,
            token_ids=tuple(sampled),
            logprobs=tuple(-float(start + i) for i in range(len(sampled))),
            versions=(self.num_steps,) * len(sampled),
            stop_reason="stop" if has_stopped else "length",
            first_position=start,
        )
