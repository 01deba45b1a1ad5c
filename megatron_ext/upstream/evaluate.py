"""Log-probabilities of a text's tokens under a checkpoint, on any layout, by the training path.

Every data-parallel rank runs its share of the windows through Megatron's schedules, forward only;
which token a value belongs to travels with it as an extra of the microbatch, so that packing and
balancing may do what they like.
Invariant the tests check: the values are those of transformers, on every layout.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import batched
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config
from torch import Tensor
from tqdm import tqdm

from megatron_ext.data.dataset import open_tokenizer, read_text
from megatron_ext.evaluation.perplexity import TokenScores, Window, join_scores
from megatron_ext.options.ranges import BadOptions
from megatron_ext.packing.batch import Sample
from megatron_ext.packing.plan import plan_step
from megatron_ext.packing.types import Microbatch
from megatron_ext.upstream.arguments import Options, build_parser, read_options
from megatron_ext.upstream.checkpoint_source import intact_source
from megatron_ext.upstream.checkpoint_tensors import load_weights
from megatron_ext.upstream.hf_source import tokenizer_folder
from megatron_ext.upstream.hf_weights import filler
from megatron_ext.upstream.layout import Layout, open_layout
from megatron_ext.upstream.microbatches import replica_of, to_device
from megatron_ext.upstream.model import bare, build_chunks
from megatron_ext.upstream.step import Stepper, build_stepper

_SHARE = 8
"""Microbatches of a rank between two updates of the progress bar."""


@dataclass(frozen=True, kw_only=True)
class FrozenModel:
    """What a forward needs of a `TrainableModel`: no optimizer, no gradient buffers."""

    chunks: list[MegatronModule]
    config: TransformerConfig

    @property
    def bare_chunks(self) -> list[GPTModel]:
        """The chunks without Megatron's precision wrapper."""
        return [bare(chunk) for chunk in self.chunks]


NO_CHECKPOINT = (
    "no checkpoint: give --hf-model (a folder with config.json, or a GGUF file) or --load (the "
    "--save folder of a training run, with its flags of the model)."
)


def parse_for_evaluation(
    words: Sequence[str], *, seq_length: int, length_flag: str = "--seq-length"
) -> Options:
    """The options of a command line that may leave out what only training needs.

    Without --tokenizer-type, an --hf-model or a converted checkpoint brings its own tokenizer.
    length_flag: what the sequence length is called where the words come from.

    Raises:
        BadOptions: every mismatch, a sentence each, with the flags of that place.
    """
    given = {flag.name for flag in build_parser().given(words)}
    read = build_parser().read(words)[0]
    extra = ["--seq-length", str(seq_length)]
    if "train_iters" not in given:
        extra += ["--train-iters", "1"]
    if "lr" not in given:
        extra += ["--lr", "1e-5"]
    if "global_batch_size" not in given:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        extra += ["--global-batch-size", str(world_size * (read.micro_batch_size or 1))]
    tokenizer = tokenizer_folder(read)
    if "tokenizer_type" not in given and tokenizer is not None:
        extra += ["--tokenizer-type", "HuggingFaceTokenizer"]
        if "tokenizer_model" not in given:
            extra += ["--tokenizer-model", tokenizer]
    try:
        return read_options([*words, *extra])
    except BadOptions as error:
        is_random = not (read.hf_model or read.load or read.pretrained_checkpoint)
        raise BadOptions(
            NO_CHECKPOINT
            if is_random and problem.startswith("missing --num-layers")
            else problem.replace("--seq-length", length_flag)
            for problem in error.problems
        ) from error


def open_stepper(options: Options, *, layout: Layout | None = None) -> Stepper:
    """The model of --load or --hf-model, ready for forwards only.  Collective.

    layout: of the options, if this process has joined the job already.

    Raises:
        ValueError: there is no such checkpoint, or it does not fit the flags.
    """
    args = options.megatron
    layout = layout or open_layout(args)
    chunks = build_chunks(args, layout, wrap=False)
    model: Any = FrozenModel(chunks=chunks, config=get_model_config(chunks[0]))
    fill_model(options, layout, chunks=chunks)
    for chunk in chunks:
        chunk.eval()
    return build_stepper(options, model=model, layout=layout)


def fill_model(options: Options, layout: Layout, *, chunks: Sequence[MegatronModule]) -> None:
    """The weights of --load, or else of --hf-model, into the chunks.  Collective.

    Raises:
        ValueError: neither flag names a checkpoint, or it does not fit the model.
    """
    source = intact_source(options.megatron, layout)
    fill = filler(options.megatron, layout)
    if source is not None:
        some = [bare(chunk) for chunk in chunks]
        load_weights(some, layout, folder=source.folder, is_verified=True)
    elif fill is not None:
        fill(list(chunks))
    else:
        raise ValueError(NO_CHECKPOINT)


def score_windows(
    options: Options, stepper: Stepper, *, tokens: Tensor, windows: Sequence[Window]
) -> TokenScores:
    """The NLL of every scored token, the same on every rank.  Collective.

    tokens: ids of the text, int64 [n], the same on every rank.
    """
    samples = [_sample(tokens, window) for window in windows]
    layout = stepper.layout
    share = _SHARE * layout.dp_size * options.megatron.micro_batch_size
    parts: list[tuple[Tensor, Tensor]] = []
    with tqdm(total=len(samples), desc="windows", disable=not layout.is_writer, leave=False) as bar:
        for some in batched(samples, share):
            parts += _score(options, stepper, samples=some)
            bar.update(len(some))
    return join_scores(parts, tokens=tokens, windows=windows)


def logprobs_of(stepper: Stepper, microbatch: Microbatch) -> Tensor:
    """Log-probabilities [B, S] of one microbatch's labels where it has weights, on every rank.

    Collective; every rank gives the same microbatch.
    """
    found = token_values(stepper, [microbatch] * fewest_microbatches(stepper))
    values = found[0].contiguous() if found else torch.zeros(microbatch.tokens_BS.shape)
    values = values.to(next(stepper.model.chunks[0].parameters()).device)
    pp = stepper.layout.groups.pp
    last = torch.distributed.get_global_rank(pp, pp.size() - 1)
    torch.distributed.broadcast(values, src=last, group=pp)
    return values.cpu()


def token_values(stepper: Stepper, microbatches: Sequence[Microbatch]) -> list[Tensor]:
    """Log-probabilities [B, S] of each microbatch, float32, on the last stage; elsewhere none.

    Microbatches with the same number on every data-parallel rank.  Collective.
    """
    kept: list[Tensor] = []

    def keep(logprobs_BS: Tensor, _: Microbatch) -> Tensor:
        kept.append(logprobs_BS.detach().float())
        return logprobs_BS

    with torch.no_grad():
        stepper.forward_backward(to_device(microbatches), keep, forward_only=True)
    return kept


def fewest_microbatches(stepper: Stepper) -> int:
    """What an interleaved pipeline must have to run; 1 without interleaving."""
    if stepper.layout.num_chunks == 1:
        return 1
    return stepper.model.config.microbatch_group_size_per_vp_stage or stepper.layout.pp_size


def read_tokens(options: Options, text: Path, *, flag: str = "--text") -> Tensor:
    """The ids [n] of a text file by the run's tokenizer, what begins a document included.

    flag: that named the file, for messages.

    Raises:
        ValueError: it cannot be read, or has tokens outside the vocabulary.
    """
    args = options.megatron
    tokenizer = open_tokenizer(kind=args.tokenizer_type, model=args.tokenizer_model)
    written = read_text(text, flag=flag)
    tokens = torch.tensor([*tokenizer.start_ids, *tokenizer.encode(written)], dtype=torch.int64)
    if len(tokens) and int(tokens.max()) >= args.vocab_size:
        raise ValueError(
            f"{flag} {text} has token {int(tokens.max())}, the vocabulary {args.vocab_size} tokens:"
            " use the tokenizer of the checkpoint (--tokenizer-type, --tokenizer-model)."
        )
    return tokens


def _sample(tokens: Tensor, window: Window) -> Sample:
    index = torch.arange(window.start, window.end)
    return Sample(tokens=tokens[index], mask=index >= window.scored_from, extras={"index": index})


def _score(
    options: Options, stepper: Stepper, *, samples: Sequence[Sample]
) -> list[tuple[Tensor, Tensor]]:
    """(index, nll) of the tokens of some windows, of all data-parallel ranks."""
    args, layout = options.megatron, stepper.layout
    plain = replace(
        options.packing,
        loss_normalization="global-token-mean",
        loss_denominator="counted",
        overlong="error",
    )
    plan = plan_step(
        samples,
        plain,
        replica=replica_of(layout, options),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
    )
    mine = []
    values = token_values(stepper, plan.microbatches)
    for microbatch, logprobs_BS in zip(plan.microbatches, values, strict=False):
        is_scored_BS = microbatch.weights_BS != 0
        nll = -logprobs_BS.cpu()[is_scored_BS]
        mine.append((microbatch.extras["index"][is_scored_BS], nll))
    everywhere: list[Any] = [None] * torch.distributed.get_world_size()
    is_first = layout.groups.tp.rank() == 0  # its tensor-parallel ranks have the same
    torch.distributed.all_gather_object(everywhere, mine if is_first else [])
    return [part for parts in everywhere for part in parts]
