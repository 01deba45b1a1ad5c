"""What a rank does in the rollout tests: sample with a tiny model, score with the trainer."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import torch
from megatron.training.global_vars import get_args
from torch import Tensor

from megatron_ext.packing.types import Microbatch
from megatron_ext.rollout.config import RolloutConfig
from megatron_ext.rollout.engine import RolloutEngine
from megatron_ext.rollout.session import RolloutSession
from megatron_ext.rollout.types import Completion, Request, SamplingParams, samples_of
from megatron_ext.upstream.checkpoint import load_weights
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.generate import generate_on_replicas
from megatron_ext.upstream.rollout import DriverFailed, MegatronDecoder
from megatron_ext.upstream.step import Stepper
from megatron_ext.upstream.update import update
from tests.upstream.hf_jobs import Job
from tests.upstream.jobs import SEQ_LENGTH, VOCAB_SIZE, build, fixed_batch, forward_backward
from tools import generate


def fixed_requests() -> list[Request]:
    """Greedy and sampled requests of all lengths; some share their prompt, token 3 stops."""
    rng = random.Random(2)
    requests = []
    for index in range(9):
        prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, SEQ_LENGTH - 2)))
        request = Request(
            prompt_ids=prompt,
            max_new_tokens=rng.randint(2, 12),
            sampling=SamplingParams(temperature=[0.0, 1.0, 0.7][index % 3]),
            seed=index,
            stop_ids=frozenset({3}),
        )
        requests += samples_of(request, 1 + index % 3)
    return requests


def trainer_logprobs(stepper: Stepper, request: Request, completion: Completion) -> list[float]:
    """What the trainer says of the sampled tokens; empty where it has no output layer."""
    tokens = torch.tensor([*request.prompt_ids, *completion.token_ids])
    length = -(-(len(tokens) - 1) // 2) * 2
    inputs, labels = (
        torch.nn.functional.pad(part, (0, length - len(part)))[None]
        for part in (tokens[:-1], tokens[1:])
    )
    microbatch = Microbatch(
        tokens_BS=inputs,
        positions_BS=torch.arange(length)[None],
        labels_BS=labels,
        weights_BS=torch.ones(1, length),
        count=1,
        padding_BS=torch.arange(length)[None] >= len(tokens) - 1,
    )
    seen: list[Tensor] = []

    def keep(logprobs_BS: Tensor, _: Microbatch) -> Tensor:
        seen.append(logprobs_BS.detach())
        return -logprobs_BS

    scorer = replace(stepper, temperature=request.sampling.temperature or 1.0)
    scorer.forward_backward([microbatch] * stepper.layout.pp_size, keep, forward_only=True)
    first = completion.first_position - 1
    return seen[0][0, first : first + len(completion.token_ids)].tolist() if seen else []


def largest_gap(
    stepper: Stepper,
    requests: list[Request],
    completions: list[Completion],
    *,
    version: int | None = None,
) -> float:
    """Between the sampler's log-probabilities and the trainer's, where there is an output layer.

    version: of the tokens that count; None = all.
    """
    gap = 0.0
    for request, completion in zip(requests, completions, strict=True):
        found = trainer_logprobs(stepper, request, completion)
        tokens = zip(found, completion.logprobs, completion.versions, strict=bool(found))
        gap = max([gap, *(abs(a - b) for a, b, v in tokens if version in (None, v))])
    return gap


def sample_and_score(
    flags: list[str], initial: Path, config: RolloutConfig, *, one_by_one: bool = False
) -> tuple[list[Completion], float]:
    """All completions, on every rank, and the largest gap to the trainer's log-probabilities."""
    with device_mode():
        options, layout, model, stepper = build(flags)
        load_weights(model.bare_chunks, layout, folder=initial)
        engine = RolloutEngine(MegatronDecoder(options.megatron, layout, model.chunks), config)
        requests = fixed_requests()
        if one_by_one:
            completions = [engine.generate([request])[0] for request in requests]
        else:
            completions = generate_on_replicas(engine, requests, layout)
        return completions, largest_gap(stepper, requests, completions)


def sample_over_new_weights(flags: list[str], initial: Path) -> tuple[list[Completion], float]:
    """Completions that got other weights after five steps, and the largest gap.

    The gap of each token is to the weights that it was sampled by.
    """
    with device_mode():
        options, layout, model, stepper = build(flags)
        load_weights(model.bare_chunks, layout, folder=initial)
        engine = RolloutEngine(
            MegatronDecoder(options.megatron, layout, model.chunks), RolloutConfig(rollout_slots=4)
        )
        requests = fixed_requests()

        def begin(session: RolloutSession) -> list[Completion]:
            session.submit_all(requests)
            return [completion for _ in range(5) for completion in session.step()]

        def end(session: RolloutSession) -> list[Completion]:
            ended = []
            while session.num_unfinished:
                ended += session.step()
            return ended

        completions = engine.run(begin, version=1)
        with torch.no_grad():
            for chunk in model.chunks:
                for parameter in chunk.parameters():
                    parameter.mul_(1.2)
        completions += engine.run(end, version=2)
        completions.sort(key=lambda completion: completion.ticket)
        after = largest_gap(stepper, requests, completions, version=2)
        load_weights(model.bare_chunks, layout, folder=initial)
        return completions, max(after, largest_gap(stepper, requests, completions, version=1))


def train_and_sample(flags: list[str], *, samples: bool) -> tuple[list[float], list[float]]:
    """Losses of three updates, and the gaps of what was sampled before each, if anything was."""
    with device_mode():
        options, layout, model, stepper = build(flags)
        engine = RolloutEngine(MegatronDecoder(options.megatron, layout, model.chunks))
        modes = [_mode(chunk) for chunk in model.chunks]
        requests = fixed_requests()[6 * layout.dp_rank :][:6]
        losses, gaps = [], []
        for step in range(3):
            if samples:
                completions = engine.generate(requests, version=step)
                assert {v for c in completions for v in c.versions} == {step}
                gaps.append(largest_gap(stepper, requests, completions))
            assert [_mode(chunk) for chunk in model.chunks] == modes
            losses.append(forward_backward(options, stepper, fixed_batch()))
            update(model, layout, num_samples=8)
        return losses, gaps


def _mode(chunk: torch.nn.Module) -> list[tuple]:
    """Everything that decoding switches, of every module."""
    names = ("training", "sequence_parallel", "reduce_scatter_embeddings")
    return [
        (
            *(getattr(module, name, None) for name in names),
            getattr(getattr(module, "config", None), "sequence_parallel", None),
            len(module._forward_pre_hooks),
        )
        for module in chunk.modules()
    ]


def layer_by_parts_and_whole(flags: list[str]) -> tuple[list[Completion], list[Completion]]:
    """Completions with our way through the layers, and with Megatron's."""
    with device_mode():
        options, layout, model, _ = build(flags)
        found = []
        for by_parts in (True, False):
            decoder = MegatronDecoder(options.megatron, layout, model.chunks, by_parts=by_parts)
            found.append(RolloutEngine(decoder).generate(fixed_requests()))
        return found[0], found[1]


def drive_badly(flags: list[str]) -> str:
    """What a rank raises when the driver's function does."""
    with device_mode():
        options, layout, model, _ = build(flags)
        engine = RolloutEngine(MegatronDecoder(options.megatron, layout, model.chunks))

        def drive(session: object) -> None:
            raise KeyError("no such episode")

        try:
            engine.run(drive)
        except (KeyError, DriverFailed) as error:
            assert engine.run(lambda session: session.num_unfinished) == 0
            return f"{type(error).__name__}: {error}"
        return ""


def fail_on_one_replica(flags: list[str]) -> str | list[Completion]:
    """What replica 0's driver raises, and what the others, which share experts with it, sample."""
    with device_mode():
        options, layout, model, _ = build(flags)
        engine = RolloutEngine(MegatronDecoder(options.megatron, layout, model.chunks))

        def drive(session: RolloutSession) -> list[Completion]:
            tickets = session.submit_all(fixed_requests())
            ended = session.step()
            if layout.dp_rank == 0:
                raise KeyError("no such episode")
            while len(ended) < len(tickets):
                ended += session.step()
            return sorted(ended, key=lambda completion: completion.ticket)

        try:
            return engine.run(drive)
        except KeyError as error:
            return f"{type(error).__name__}: {error}"


def sample_checkpoints(folders: dict[str, Path], flags: str) -> dict[str, list[Completion]]:
    """Completions by checkpoints of Hugging Face, one after the other on one layout."""
    job = Job(flags)
    found = {}
    with device_mode():
        for name, folder in folders.items():
            _, chunks = job.filled(folder)
            args = get_args()
            decoder = MegatronDecoder(args, job.layout, chunks)
            requests = [
                replace(
                    request,
                    prompt_ids=tuple(t % args.vocab_size for t in request.prompt_ids),
                    stop_ids=frozenset(),
                )
                for request in fixed_requests()
            ]
            found[name] = RolloutEngine(decoder).generate(requests)
    return found


def run_generate_tool(words: list[str]) -> None:
    """tools/generate.py on this rank."""
    generate.main(words)
