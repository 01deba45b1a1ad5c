"""Building this rank's model chunks and their optimizer through Megatron's builders."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from megatron.training.argument_utils import core_transformer_config_from_args, gpt_config_from_args
from megatron.training.models import GPTModelConfig
from megatron.training.training import (
    get_megatron_ddp_config,
    get_megatron_optimizer_config,
    get_optimizer_param_scheduler,
)

from megatron_ext.upstream.layout import Layout
from megatron_ext.upstream.mla_parts import LatentShape
from megatron_ext.upstream.rotary import rotate_rows_at_once
from megatron_ext.upstream.specs import block_spec

Hook = Callable[[list[MegatronModule]], list[MegatronModule]]


@dataclass(frozen=True, kw_only=True)
class TrainableModel:
    """This rank's model chunks with the optimizer and schedule that update them."""

    chunks: list[MegatronModule]
    config: TransformerConfig
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler

    @property
    def bare_chunks(self) -> list[GPTModel]:
        """The chunks without Megatron's data-parallel and precision wrappers."""
        return [bare(chunk) for chunk in self.chunks]

    def settle_parameters(self) -> None:
        """Finish parameter all-gathers that overlap with the next forward.  Collective.

        Until then a rank of the distributed optimizer holds new values only of its own shard.
        """
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)


def bare(chunk: MegatronModule) -> GPTModel:
    """The GPT model inside Megatron's wrappers."""
    return get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)


def model_config(
    args: Namespace, *, pre_wrap_hooks: Sequence[Hook] = (), latent: LatentShape | None = None
) -> GPTModelConfig:
    """Megatron's model description from its arguments, with our layer specs.

    Lengths may differ between microbatches (``variable_seq_lengths``); a pipeline then exchanges
    the shape before each tensor.
    """
    latent = latent or LatentShape.of_arguments(args)
    transformer = core_transformer_config_from_args(args)
    transformer.variable_seq_lengths = transformer.pipeline_model_parallel_size > 1
    config = gpt_config_from_args(args, config=transformer)
    config.rope_scaling_factor = args.rope_scaling_factor  # gpt_config_from_args forgets it
    config.transformer_layer_spec = block_spec
    if latent is not None:
        config.transformer_layer_spec = partial(block_spec, latent=latent)
        config.position_embedding_type = "none"  # it turns its keys by itself
    config.pre_wrap_hooks = [rotate_rows_at_once, *pre_wrap_hooks]
    return config


def build_chunks(
    args: Namespace,
    layout: Layout,
    *,
    wrap: bool = True,
    pre_wrap_hooks: Sequence[Hook] = (),
    latent: LatentShape | None = None,
) -> list[MegatronModule]:
    """This rank's model chunks; ``wrap=False`` leaves out data parallelism (for inference).

    latent: sizes of attention converted by `megatron_ext.mla`; None = as the arguments say.
    """
    config = model_config(args, pre_wrap_hooks=pre_wrap_hooks, latent=latent)
    builder = config.get_builder_cls()(config)
    return builder.build_distributed_models(
        pg_collection=layout.groups,
        ddp_config=get_megatron_ddp_config(args),
        overlap_param_gather_with_optimizer_step=args.overlap_param_gather_with_optimizer_step,
        wrap_with_ddp=wrap,
        data_parallel_random_init=args.data_parallel_random_init,
    )


def build_trainable(
    args: Namespace,
    layout: Layout,
    *,
    pre_wrap_hooks: Sequence[Hook] = (),
    latent: LatentShape | None = None,
    fill: Callable[[list[MegatronModule]], object] | None = None,
) -> TrainableModel:
    """Model chunks, optimizer and learning-rate schedule as Megatron's arguments describe them.

    fill: sets the weights of the wrapped chunks, before the optimizer copies them.
    """
    chunks = build_chunks(args, layout, pre_wrap_hooks=pre_wrap_hooks, latent=latent)
    if fill is not None:
        fill(chunks)
    optimizer_config, overrides = get_megatron_optimizer_config(args)
    optimizer = get_megatron_optimizer(
        optimizer_config,
        chunks,
        config_overrides=overrides,
        use_gloo_process_groups=args.use_gloo_process_groups,
    )
    config = get_model_config(chunks[0])
    config.grad_scale_func = optimizer.scale_loss
    if args.overlap_grad_reduce:
        config.no_sync_func = _single([chunk.no_sync for chunk in chunks])
        if args.align_grad_reduce:
            config.grad_sync_func = _single([chunk.start_grad_sync for chunk in chunks])
    if args.overlap_param_gather and args.align_param_gather:
        config.param_sync_func = _single([chunk.start_param_sync for chunk in chunks])
    return TrainableModel(
        chunks=chunks,
        config=config,
        optimizer=optimizer,
        scheduler=get_optimizer_param_scheduler(optimizer),
    )


def _single(functions: list[Callable[..., object]]) -> object:
    return functions[0] if len(functions) == 1 else functions
