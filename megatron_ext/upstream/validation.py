"""Every mismatch of a command line that can be seen before a model is built, as sentences.

Megatron checks much of this as well, but stops at its first assertion, often without naming a flag;
what it alone knows still ends in one line (``arguments.py``).
Invariant the tests check: a command line without problems is one that Megatron's parser and model
configuration take; one with several has all of them listed.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ext.options.paths import path_problems
from megatron_ext.options.ranges import flag_of
from megatron_ext.upstream.command_line import GivenFlag
from megatron_ext.upstream.config import LatentConfig
from megatron_ext.upstream.machine import Machine
from megatron_ext.upstream.validation_layout import layout_problems
from megatron_ext.upstream.validation_rl import demonstration_problems, reinforcement_problems
from megatron_ext.upstream.validation_support import support_problems
from megatron_ext.upstream.validation_training import training_problems

_OF_MODEL = ("num_layers", "hidden_size", "num_attention_heads")
_REQUIRED = (*_OF_MODEL, "seq_length", "train_iters", "lr")
_PATHS = (
    *("save", "load", "pretrained_checkpoint", "output_dir", "wandb_project", "hf_model"),
    "te_precision_config_file",
)


def problems(
    args: Namespace,
    configs: Mapping[str, Any],
    *,
    given: Sequence[GivenFlag],
    machine: Machine,
) -> list[str]:
    """Every mismatch as one sentence with flag, value, relation and remedy; empty when all fits.

    args: with numbers that are all in range (`validation_ranges`).
    configs: of our rooms, by name; one that could not be made for its own problems is left out.
    """
    found = [*required(args), *support_problems(args, given, machine=machine)]
    found += layout_problems(args) + training_problems(args)
    found += path_problems({flag_of(name): getattr(args, name) for name in _PATHS})
    if "data" in configs:
        found += configs["data"].problems(
            tokenizer_model=args.tokenizer_model,
            eval_interval=args.eval_interval,
            seq_length=args.seq_length,
        )
    found += reinforcement_problems(args, configs) + demonstration_problems(args, configs)
    if "latent" in configs:
        found += _latent_problems(args, configs["latent"])
    if "packing" in configs:
        found += configs["packing"].problems(
            seq_length=args.seq_length or 1,
            sequence_multiple=args.tensor_model_parallel_size if args.sequence_parallel else 1,
        )
    if "parallel" in configs and configs["parallel"].scatter_gather_pipeline_tensors:
        found += _scatter_gather_problems(args)
    return found


def required(args: Namespace) -> list[str]:
    """The sizes that nothing has given; those of --hf-model are missing only if it was refused."""
    names = [name for name in _REQUIRED if not (args.hf_model and name in _OF_MODEL)]
    missing = [flag_of(name) for name in names if getattr(args, name) is None]
    if args.tokenizer_type is not None and args.vocab_size is None and not args.hf_model:
        missing.append("--vocab-size")
    return [f"missing {', '.join(missing)}: no default would fit."] if missing else []


def _latent_problems(args: Namespace, config: LatentConfig) -> list[str]:
    """Of converted attention."""
    heads = args.num_attention_heads
    if heads is None or args.hidden_size is None:
        return []
    found = config.problems(
        head_size=args.kv_channels or args.hidden_size // heads,
        num_groups=args.num_query_groups if args.group_query_attention else heads,
        tp_size=args.tensor_model_parallel_size,
    )
    if config.latent_layout == "none":
        return found
    what = f"--latent-layout {config.latent_layout}"
    if args.transformer_impl != "local":
        found.append(
            f"{what} with --transformer-impl {args.transformer_impl}: converted attention is built "
            "from the local layers. Use --transformer-impl local."
        )
    if args.context_parallel_size > 1:
        found.append(
            f"{what} with --context-parallel-size {args.context_parallel_size}: converted "
            "attention sees whole sequences. Use 1."
        )
    if args.multi_latent_attention:
        found.append(f"{what} and --multi-latent-attention: an attention is one or the other.")
    if args.algorithm != "sft":
        found.append(
            f"{what} with --algorithm {args.algorithm}: the rollout engine does not decode "
            "converted attention yet. Use --algorithm sft."
        )
    return found


def _scatter_gather_problems(args: Namespace) -> list[str]:
    flag = "--scatter-gather-pipeline-tensors"
    if args.tensor_model_parallel_size == 1 or args.pipeline_model_parallel_size == 1:
        return [
            f"{flag} needs --tensor-model-parallel-size and --pipeline-model-parallel-size > 1: "
            "there is nothing to scatter or no boundary to send over."
        ]
    if args.sequence_parallel:
        return [
            f"{flag} and --sequence-parallel: boundary tensors are 1/t already under sequence "
            "parallelism; drop one of the two."
        ]
    return []
