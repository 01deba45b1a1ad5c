"""Sampling from a checkpoint: Hugging Face or GGUF (--hf-model) or Megatron (--load).

Replicas share out what is to be sampled; what comes out does not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch.distributed as dist

from megatron_ext.environments.base import EpisodeStart
from megatron_ext.environments.codecs import ModelCodec
from megatron_ext.environments.codecs import open_codec as open_codec_of
from megatron_ext.environments.episode import Episode
from megatron_ext.environments.runner import EpisodeRunner
from megatron_ext.rollout.engine import RolloutEngine
from megatron_ext.rollout.types import Completion, Request
from megatron_ext.upstream.arguments import Options, build_parser
from megatron_ext.upstream.evaluate import fill_model, parse_for_evaluation
from megatron_ext.upstream.hf_source import described, stop_ids_of_record
from megatron_ext.upstream.layout import Layout, open_layout
from megatron_ext.upstream.model import build_chunks
from megatron_ext.upstream.rollout import MegatronDecoder

USUAL_CONTEXT = 2048
"""Tokens of a sequence, unless told or the checkpoint has fewer positions."""


def parse_for_sampling(words: Sequence[str], *, max_context: int | None = None) -> Options:
    """The options of a command line that may leave out what only training needs.

    max_context: longest sequence, prompt included, which becomes --seq-length; None = 2048, or
    fewer where the checkpoint has fewer positions.
    """
    given = {flag.name for flag in build_parser().given(words)}
    length = usual_context(words) if max_context is None else max_context
    positions = ["--max-position-embeddings", str(length)]
    if "max_position_embeddings" in given:
        positions = []
    return parse_for_evaluation(
        [*words, *positions], seq_length=length, length_flag="--max-context"
    )


def usual_context(words: Sequence[str], *, at_most: int = USUAL_CONTEXT) -> int:
    """The longest sequence of a command line's checkpoint, up to a limit."""
    parsed = build_parser().read(words)[0]
    try:
        found = [checkpoint.architecture for checkpoint in described(parsed)]
    except ValueError:
        return at_most  # `read_options` says what is wrong, with all the rest
    if not found:
        return min(at_most, parsed.max_position_embeddings or at_most)
    longest = [min(a.max_positions, a.sliding_window or a.max_positions) for a in found]
    return min(at_most, *longest)


def open_codec(options: Options) -> ModelCodec:
    """The codec of a run's tokenizer."""
    args = options.megatron
    return open_codec_of(
        kind=args.tokenizer_type,
        model=args.tokenizer_model,
        checkpoint=args.hf_model,
        more_stop_ids=stop_ids_of_record(args),
        chat_template=args.chat_template,
        prompts_as_messages=options.environments.tasks_as_chat,
    )


def open_sampler(options: Options) -> MegatronDecoder:
    """A model that only samples, with the weights of the options' checkpoint.  Collective.

    Raises:
        ValueError: there is no such checkpoint, or it does not fit the options.
    """
    layout = open_layout(options.megatron)
    chunks = build_chunks(options.megatron, layout, wrap=False)
    fill_model(options, layout, chunks=chunks)
    return MegatronDecoder(options.megatron, layout, chunks)


def open_decoder(words: Sequence[str], *, max_context: int) -> tuple[Options, MegatronDecoder]:
    """`parse_for_sampling` and `open_sampler` in one."""
    options = parse_for_sampling(words, max_context=max_context)
    return options, open_sampler(options)


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

    def generate(mine: list[Request]) -> list[Completion]:
        return engine.generate(mine, version=version, on_completion=on_completion)

    keys = [request.prompt_ids for request in requests]
    return _share_out(requests, keys, layout, work=generate)


def play_on_replicas(
    engine: RolloutEngine,
    runner: EpisodeRunner,
    starts: Sequence[EpisodeStart],
    layout: Layout,
    *,
    version: int = 0,
    on_episode: Callable[[Episode], None] | None = None,
) -> list[Episode]:
    """An episode for every start, in order, on every rank; replicas share them out.  Collective.

    Groups stay together.
    on_episode: told of each of a replica's own as it ends, on the rank that drives it.
    """

    def play(mine: list[EpisodeStart]) -> list[Episode]:
        return engine.run(
            lambda session: runner.run(session, mine, on_episode=on_episode), version=version
        )

    return _share_out(starts, [start.group for start in starts], layout, work=play)


def _share_out[Item, Result](
    items: Sequence[Item],
    keys: Iterable[object],
    layout: Layout,
    *,
    work: Callable[[list[Item]], list[Result]],
) -> list[Result]:
    """What `work` makes of all items, in order; items with one key go to one replica."""
    order: dict[object, int] = {}
    owners = [order.setdefault(key, len(order)) % layout.dp_size for key in keys]
    found = work([i for i, owner in zip(items, owners, strict=True) if owner == layout.dp_rank])
    parts: list[list[Result] | None] = [None] * layout.dp_size
    dist.all_gather_object(parts, found, group=layout.groups.dp)
    iterators = [iter(part or []) for part in parts]
    return [next(iterators[owner]) for owner in owners]
