"""What this machine cannot do, and which of Megatron's options megatron-ext does not use."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Sequence

from megatron_ext.upstream.command_line import GivenFlag
from megatron_ext.upstream.machine import Machine

_NOT_SUPPORTED = {
    "hierarchical_context_parallel_sizes": "use --context-parallel-size",
    "tensor_parallel_num_weight_shards": "use --use-distributed-optimizer",
    "expert_tensor_parallel_num_weight_shards": "use --use-distributed-optimizer",
    "mtp_num_layers": "the objectives here train the next token only",
    "hybrid_layer_pattern": "megatron-ext builds GPT models",
    "hybrid_override_pattern": "megatron-ext builds GPT models",
    "spec": "the layers are megatron-ext's own (--transformer-impl chooses between two)",
    "yaml_cfg": "give flags",
    "use_megatron_fsdp": "use --use-distributed-optimizer",
    "use_torch_fsdp2": "use --use-distributed-optimizer",
    "overlap_moe_expert_parallel_comm": "its schedule splits the model's chunks",
    "enable_cuda_graph": "microbatches differ in length",
    "external_cuda_graph": "microbatches differ in length",
    "optimizer_cuda_graph": "its updates would not be those that resume bit for bit",
    "async_save": "a step's checkpoint is complete when the step ends",
    "non_persistent_ckpt_type": "every checkpoint is complete: use --save-interval",
    "ckpt_convert_format": "every checkpoint is torch_dist",
    "use_checkpoint_args": "give the flags the checkpoint was saved with",
    "override_ckpt_iteration": "--ckpt-step goes back to a step, --finetune starts anew",
    "load_main_params_from_ckpt": "main parameters always follow what was loaded",
    "save_retain_interval": "--keep-checkpoints says what is kept",
    "moe_use_upcycling": "convert the checkpoint first",
    "encoder_num_layers": "use --num-layers",
    "decoder_num_layers": "use --num-layers",
    "train_samples": "count steps: --train-iters",
    "lr_decay_samples": "count steps: --lr-decay-iters",
    "lr_wsd_decay_samples": "count steps: --lr-wsd-decay-iters",
    "lr_warmup_samples": "count steps: --lr-warmup-iters",
    "rampup_batch_size": "every step trains --global-batch-size samples",
    "step_batch_size_schedule": "every step trains --global-batch-size samples",
    "decrease_batch_size_if_needed": "every step trains --global-batch-size samples",
    "iterations_to_skip": "every step is trained",
    "freeze_all_layers": "there would be nothing to train",
    "checkpoint_activations": "use --recompute-granularity",
    "tensorboard_dir": "--output-dir holds the TensorBoard events",
}
"""Option -> why not, or what to use; refused when it is set."""
_NOT_EVEN_OFF = {
    *("encoder_num_layers", "decoder_num_layers", "hybrid_layer_pattern"),
    *("hybrid_override_pattern", "train_samples", "lr_decay_samples", "lr_warmup_samples"),
    "lr_wsd_decay_samples",
}
"""Those whose 0 or empty text Megatron takes for a value."""
_FIXED = {
    "ckpt_format": ("torch_dist", "it is the only format that loads on another layout"),
    "dist_ckpt_strictness": ("assume_ok_unexpected", "every missing or extra tensor is an error"),
    "rerun_mode": ("disabled", "it replays Megatron's own data iterators"),
    "dataloader_type": ("external", "samples come from --train-data"),
    "cuda_graph_impl": ("none", "microbatches differ in length"),
}
"""Option -> the only value that works here, and why."""
_OTHER_GROUPS = {
    "rl": "this is Megatron's own RL loop",
    "sft": "samples come from --train-data",
    "data and dataloader": "samples come from --train-data",
    "autoresume": "the same command continues a run",
    "biencoder": "megatron-ext builds GPT models",
    "vision": "megatron-ext builds GPT models",
    "experimental_attention_variant": "megatron-ext builds GPT models",
    "heterogeneous architecture": "all layers of a kind are equal",
    "Logits Distillation": "it is part of Megatron's own training loop",
    "inference": "this is Megatron's own inference engine",
    "In-process restart": "the same command continues a run",
    "ft_package": "the same command continues a run",
    "fault injector": "kill a process instead",
}
"""Megatron's option groups that nothing here reads, refused when one of them is given."""
_USED_ALL_THE_SAME = {"seq_length", "num_workers"}
_USED_OF_IDLE_GROUPS = {"eval_interval"}
_IDLE_GROUPS = {"validation", "profiling", "straggler", "workload inspector", "one logger", "msc"}
_IDLE = {
    "exit_signal_handler_for_dataloader",
    "exit_signal_handler_for_training",
    "log_interval",
    "log_params_norm",
    "log_throughput",
    "log_progress",
    "log_timers_to_tensorboard",
    "log_loss_scale_to_tensorboard",
    "log_validation_ppl_to_tensorboard",
    "log_memory_to_tensorboard",
    "log_memory_interval",
    "log_device_memory_used",
    "log_world_size_to_tensorboard",
    "log_energy",
    "tensorboard_log_interval",
    "tensorboard_queue_size",
    "manual_gc",
    "manual_gc_interval",
    "num_workers",
}


def support_problems(args: Namespace, given: Sequence[GivenFlag], *, machine: Machine) -> list[str]:
    """Options that the machine or megatron-ext cannot serve."""
    named = {option.name for option in given} & _NOT_EVEN_OFF
    found = [
        f"{_flag(name)} is not supported: {why}."
        for name, why in _NOT_SUPPORTED.items()
        if getattr(args, name, None) or name in named
    ]
    found += [
        f"{_flag(name)} {getattr(args, name)} is not supported: {why}; {value} is the only choice."
        for name, (value, why) in _FIXED.items()
        if getattr(args, name) != value
    ]
    found += [
        f"{option.flag} is not supported: {_OTHER_GROUPS[option.group]}."
        for option in given
        if option.group in _OTHER_GROUPS and option.name not in _USED_ALL_THE_SAME
    ]
    return [
        *found,
        *_machine_problems(args, machine),
        *_without_te(args, machine),
        *_recompute_problems(args, machine),
    ]


def idle_flags(given: Iterable[GivenFlag]) -> list[str]:
    """Given flags of Megatron's own loop that change nothing here."""
    idle = (o for o in given if o.group in _IDLE_GROUPS or o.name in _IDLE)
    return [option.flag for option in idle if option.name not in _USED_OF_IDLE_GROUPS]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _machine_problems(args: Namespace, machine: Machine) -> list[str]:
    if machine.has_cuda:
        return []
    found = []
    if args.distributed_backend != "gloo":
        found.append(f"--distributed-backend {args.distributed_backend} needs a GPU: use gloo.")
    needs_gpu = {
        "--fp8-format": args.fp8,
        "--fp4-format": args.fp4,
        "--optimizer-cpu-offload": args.optimizer_cpu_offload,
        "--tp-comm-overlap": args.tp_comm_overlap,
        "--use-nccl-ub": args.nccl_ub,
        "--cpu-offloading-num-layers": args.cpu_offloading_num_layers,
        "--fine-grained-activation-offloading": args.fine_grained_activation_offloading,
    }
    found += [
        f"{flag} needs a GPU, and torch sees none here: drop it."
        for flag, value in needs_gpu.items()
        if value
    ]
    return found


def _without_te(args: Namespace, machine: Machine) -> list[str]:
    """What is Transformer Engine's to do."""
    if machine.has_transformer_engine and args.transformer_impl == "transformer_engine":
        return []
    found = []
    if args.transformer_impl != "local":
        remedy = "install the gpu extra, or use local" if machine.has_cuda else "use local"
        found.append(
            f"--transformer-impl {args.transformer_impl} needs Transformer Engine and a GPU: "
            f"{remedy}."
        )
    if args.context_parallel_size > 1:
        found.append(
            f"--context-parallel-size {args.context_parallel_size} needs the attention of "
            "Transformer Engine: use 1."
        )
    if args.window_size is not None:
        found.append("--window-size needs the attention of Transformer Engine: drop it.")
    if args.te_precision_config_file:
        found.append("--te-precision-config-file needs Transformer Engine: drop it.")
    if args.moe_latent_size is not None:
        found.append("--moe-latent-size needs Transformer Engine: drop it.")
    if args.softmax_type != "vanilla":
        found.append(f"--softmax-type {args.softmax_type} needs Transformer Engine: use vanilla.")
    if args.moe_grouped_gemm:
        found.append(
            "--moe-grouped-gemm needs Transformer Engine: drop it, experts run one by one."
        )
    if args.moe_permute_fusion:
        found.append("--moe-permute-fusion needs Transformer Engine: drop it.")
    fused_adam = machine.has_transformer_engine or (machine.has_cuda and machine.has_apex)
    if args.use_precision_aware_optimizer and not machine.has_transformer_engine:
        found.append("--use-precision-aware-optimizer needs Transformer Engine's Adam: drop it.")
    if args.use_distributed_optimizer and machine.has_cuda and not fused_adam:
        found.append(
            "--use-distributed-optimizer needs the fused Adam of Transformer Engine or apex on a "
            "GPU (Megatron 0.19.2 loads its own checkpoints wrongly with torch's Adam): install "
            "the gpu extra, or drop the flag."
        )
    return found


def _recompute_problems(args: Namespace, machine: Machine) -> list[str]:
    """Recomputation that would do nothing, or that Megatron cannot do here."""
    modules = args.recompute_modules or []
    if args.recompute_granularity == "full":
        missing = [
            flag
            for flag, value in (
                ("--recompute-method", args.recompute_method),
                ("--recompute-num-layers", args.recompute_num_layers),
            )
            if value is None
        ]
        return [
            f"--recompute-granularity full needs {flag}: 'uniform' and 1 recompute every layer."
            for flag in missing
        ]
    if modules and args.recompute_granularity is None and not args.recompute_activations:
        return [
            f"--recompute-modules {' '.join(modules)} needs --recompute-granularity selective: "
            "nothing would be recomputed."
        ]
    if args.recompute_method is not None or args.recompute_num_layers is not None:
        return [
            "--recompute-method and --recompute-num-layers are of --recompute-granularity full: "
            "give it, or drop them."
        ]
    reasons = {
        "moe": (not args.num_experts, "needs --num-experts: the model is dense"),
        "shared_experts": (
            not args.moe_shared_expert_intermediate_size,
            "needs --moe-shared-expert-intermediate-size: there is no shared expert",
        ),
        "mla_up_proj": (
            not args.multi_latent_attention,
            "needs --multi-latent-attention: there is no up-projection",
        ),
        "moe_act": (
            not args.moe_grouped_gemm,
            "recomputes in the grouped experts of Transformer Engine (--moe-grouped-gemm)",
        ),
        "gdn_norm_out": (True, "is of a layer that megatron-ext does not build"),
    }
    if machine.has_cuda and not machine.has_transformer_engine:
        dies = "makes Megatron 0.19.2 die in a NameError without Transformer Engine"
        reasons |= {"layernorm": (True, dies), "mla_up_proj": (True, dies)}
    found = []
    for module in modules:
        is_wrong, reason = reasons.get(module, (False, ""))
        if is_wrong:
            found.append(f"--recompute-modules {module} {reason}: leave it out.")
    return found
