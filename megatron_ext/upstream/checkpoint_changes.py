"""What a resumed run does otherwise than the run that was saved: listed, or refused.

Every option is compared, apart from those named here that move files, show progress or divide the
work among processes: their results differ by rounding at most.
Invariant the tests check: an option with a flag is free, or its change is in the list.
Not covered: options that one of the two versions does not have; they have no old or no new value.
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from typing import Any

from megatron_ext.upstream.arguments import build_parser

_FILES = """
save load output_dir run_title ckpt_step finetune pretrained_checkpoint hf_model drop_mtp_layers
exit_on_missing_checkpoint save_interval keep_checkpoints verify_checksums verify_integrity
no_save_optim no_save_rng no_load_optim no_load_rng ckpt_fully_parallel_save
ckpt_fully_parallel_save_deprecated ckpt_fully_parallel_load ckpt_assume_constant_structure
dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient
ckpt_fully_parallel_load_exchange_algo
override_opt_param_scheduler use_checkpoint_opt_param_scheduler exit_interval exit_signal
exit_signal_handler exit_duration_in_mins train_iters data_cache_path
"""
_SHOWN = """
report_html report_interval_seconds progress_interval_seconds tensorboard_events rollouts_megabytes
wandb_project wandb_exp_name wandb_save_dir wandb_entity eval_interval eval_iters eval_every
eval_count eval_samples eval_tasks valid_data log_interval log_params_norm log_throughput
log_progress log_timers_to_tensorboard log_loss_scale_to_tensorboard log_memory_interval
log_validation_ppl_to_tensorboard log_memory_to_tensorboard log_world_size_to_tensorboard
log_device_memory_used log_energy log_num_zeros_in_grad log_straggler logging_level
tensorboard_dir tensorboard_log_interval tensorboard_queue_size timing_log_level timing_log_option
barrier_with_L1_time check_for_nan_in_loss_and_grad check_for_large_grads check_for_spiky_loss
check_weight_hash_across_dp_replicas_interval profile profile_ranks profile_step_start
profile_step_end use_pytorch_profiler record_memory_history memory_snapshot_path record_shapes
"""
_DIVIDED = """
tensor_model_parallel_size pipeline_model_parallel_size num_virtual_stages_per_pipeline_rank
num_layers_per_virtual_pipeline_stage decoder_first_pipeline_num_layers
decoder_last_pipeline_num_layers pipeline_model_parallel_layout context_parallel_size cp_comm_type
microbatch_group_size_per_vp_stage account_for_embedding_in_pipeline_split
account_for_loss_in_pipeline_split expert_model_parallel_size expert_tensor_parallel_size
sequence_parallel micro_batch_size use_distributed_optimizer overlap_grad_reduce
overlap_param_gather align_grad_reduce align_param_gather overlap_p2p_comm ddp_bucket_size
ddp_num_buckets scatter_gather_pipeline_tensors packing max_tokens_per_microbatch
max_sequences_per_row pad_rows_to_capacity balance_attention_weight logprob_chunk_size
rollout_slots rollout_cache_tokens rollout_prefill_tokens rollout_share_prefill
environment_workers math_workers num_workers recompute_granularity recompute_method
recompute_modules recompute_num_layers distribute_saved_activations moe_token_dispatcher_type
moe_grouped_gemm moe_permute_fusion moe_shared_expert_overlap moe_layer_recompute
distributed_backend distributed_timeout_minutes distributed_timeout_seconds_after_init
lazy_mpu_init local_rank use_cpu_initialization transformer_impl attention_backend
use_flash_attn bias_gelu_fusion bias_swiglu_fusion bias_dropout_fusion masked_softmax_fusion
no_persist_layer_norm apply_rope_fusion gradient_accumulation_fusion
cross_entropy_loss_fusion cross_entropy_fusion_impl deterministic_mode disable_jit_fuser
delay_wgrad_compute defer_embedding_wgrad_compute tp_comm_overlap manual_gc manual_gc_interval
manual_gc_eval empty_unused_memory_level max_position_embeddings make_vocab_size_divisible_by
padded_vocab_size init_method_std embedding_init_method_std
"""
FREE = frozenset(f"{_FILES} {_SHOWN} {_DIVIDED}".split())
"""Options that may differ without a word."""
_TOLD_APART = {"seed", "global_batch_size", "train_data", "tasks", "task_seed", "group_size"}
"""Options of the sentences of `changes_of_data`."""
_SCHEDULE = frozenset(
    {
        *("lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_warmup_iters"),
        *("lr_warmup_fraction", "lr_warmup_init", "lr_wsd_decay_iters", "lr_wsd_decay_style"),
        *("weight_decay", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style"),
        *("decoupled_lr", "decoupled_min_lr"),
    }
)
"""Those of the learning-rate schedule, which one flag takes from the checkpoint."""


def changes(
    args: Namespace, *, saved_args: Namespace, samples_id: str, saved_samples_id: str
) -> list[str]:
    """Every change that is allowed and makes the run another one, as ``flag: old -> new``.

    samples_id: identifies the training samples; empty = not known.
    """
    found = changes_of_data(
        args, saved_args=saved_args, samples_id=samples_id, saved_samples_id=saved_samples_id
    )
    skipped = FREE | (_SCHEDULE if args.use_checkpoint_opt_param_scheduler else frozenset())
    options = {action.dest: action for action in reversed(build_parser()._actions)}
    old, new = vars(saved_args), vars(args)
    for name, action in reversed(options.items()):
        if name in skipped | _TOLD_APART or not (name in new and name in old):
            continue
        before, now = old[name], new[name]
        if not _same(before, now):
            text = f"{action.option_strings[0]}: {_shown(action, before)} -> {_shown(action, now)}"
            found.append(text)
    return found


def unresumable(args: Namespace, saved_args: Namespace) -> list[str]:
    """Changes with which a run cannot go on, as sentences."""
    found = []
    before = getattr(saved_args, "algorithm", args.algorithm)
    if "sft" in (before, args.algorithm) and before != args.algorithm:
        found.append(
            f"--algorithm {before} is now {args.algorithm}: the position in the data and the "
            "schedule belong to the other kind of training. Start a new run from its weights: "
            "--finetune and another --save."
        )
    before = getattr(saved_args, "optimizer", args.optimizer)
    if before != args.optimizer and not args.no_load_optim:
        found.append(
            f"--optimizer {before} is now {args.optimizer}, which cannot use the other's state: "
            "go on with the old one, or drop the state with --no-load-optim."
        )
    return found


def changes_of_data(
    args: Namespace, *, saved_args: Namespace, samples_id: str, saved_samples_id: str
) -> list[str]:
    """What makes a resumed run see other samples than the saved one would have; allowed, but said.

    samples_id: identifies the training samples; empty = not known.
    """
    found = []
    before, now = getattr(saved_args, "seed", args.seed), args.seed
    if before != now:
        found.append(
            f"--seed {before} is now {now}: the samples come in another order from here on, so "
            "some of this epoch are seen twice and some not at all; random states go on as saved"
        )
    before = getattr(saved_args, "global_batch_size", args.global_batch_size)
    now = args.global_batch_size
    if before != now:
        found.append(
            f"--global-batch-size {before} is now {now}: the data goes on at the next sample, and "
            "steps go on counting updates"
        )
    if samples_id and saved_samples_id and samples_id != saved_samples_id:
        name = "train_data" if args.algorithm == "sft" else "tasks"
        before, now = getattr(saved_args, name, None), getattr(args, name)
        found.append(
            f"--{name.replace('_', '-')} {before} ({saved_samples_id}) is now {now} "
            f"({samples_id}): its order is entered at the position that was reached in the old one"
        )
    return found


def _same(before: Any, now: Any) -> bool:
    one, other = (list(v) if isinstance(v, tuple) else v for v in (before, now))
    return bool(one == other)


def _shown(action: argparse.Action, value: Any) -> str:
    """A value as the command line has it; of a switch, whether it is given."""
    if isinstance(action, argparse._StoreTrueAction | argparse._StoreFalseAction):
        return "given" if value == action.const else "not given"
    text = str(getattr(value, "name", value))
    return text if len(text) <= 60 else f"{text[:57]}..."
