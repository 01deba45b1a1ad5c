"""Batch, schedule, precision, optimizer and experts: values that cannot be trained with."""

from __future__ import annotations

from argparse import Namespace

from megatron_ext.upstream.validation_layout import not_a_multiple

TOKENIZERS = {
    None: "the bytes of the text",
    "NullTokenizer": "the same, with a --vocab-size of your own",
    "HuggingFaceTokenizer": "transformers, from --tokenizer-model",
}
"""What --tokenizer-type can be, and what makes the tokens then."""
BYTE_VOCABULARY = 257
"""256 byte values and an end-of-text token: the tokenizer used when none is named."""


def training_problems(args: Namespace) -> list[str]:
    """What does not fit together, or is out of range, in how the model is trained."""
    return [
        *_batch_problems(args),
        *_schedule_problems(args),
        *_optimizer_problems(args),
        *_model_problems(args),
        *_rotary_problems(args),
        *_expert_problems(args),
        *_tokenizer_problems(args),
    ]


def _batch_problems(args: Namespace) -> list[str]:
    found = []
    if args.micro_batch_size is None:
        found.append("--micro-batch-size is missing: 1 is a good start.")
    elif args.global_batch_size is not None:
        replica = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
        replicas = max(1, args.world_size // (replica * args.context_parallel_size))
        of = f"--micro-batch-size {args.micro_batch_size} x {replicas} data-parallel ranks"
        why = "every rank runs equally many microbatches"
        size = args.micro_batch_size * replicas
        found += not_a_multiple("global-batch-size", args.global_batch_size, size, of=of, why=why)
    longest, length = args.max_position_embeddings, args.seq_length
    if longest is not None and length is not None and longest < length:
        found.append(
            f"--max-position-embeddings {longest} is below --seq-length {length}: the last "
            f"positions would have no embedding. Use {length} or more, or leave it out."
        )
    if args.save is None and args.save_interval is not None:
        found.append("--save-interval needs --save: name the folder to save in.")
    if args.save is None and args.save_interval_minutes:
        found.append("--save-interval-minutes needs --save: name the folder to save in.")
    return found


def _schedule_problems(args: Namespace) -> list[str]:
    found = []
    if args.lr is not None:
        lowest, first = args.min_lr, args.lr_warmup_init
        found += [
            f"--{name} {value} is above --lr {args.lr}: the rate is between 0 and that."
            for name, value in (("min-lr", lowest), ("lr-warmup-init", first))
            if value > args.lr
        ]
    steps = args.lr_decay_iters if args.lr_decay_iters is not None else args.train_iters
    fraction, warmup = args.lr_warmup_fraction, args.lr_warmup_iters
    if fraction is not None and warmup:
        found.append("--lr-warmup-fraction and --lr-warmup-iters say the same: use one of them.")
    if steps is not None and fraction is None and warmup >= steps:
        found.append(
            f"--lr-warmup-iters {warmup} leaves no step of the {steps} that the learning rate is "
            "scheduled for (--lr-decay-iters, else --train-iters): use fewer."
        )
    if args.lr_decay_style == "WSD" and args.lr_wsd_decay_iters is None:
        found.append("--lr-decay-style WSD needs --lr-wsd-decay-iters: the steps of its decay.")
    if args.weight_decay_incr_style == "constant":
        found += [
            f"--{name} needs --weight-decay-incr-style linear or cosine."
            for name, value in (
                ("start-weight-decay", args.start_weight_decay),
                ("end-weight-decay", args.end_weight_decay),
            )
            if value is not None
        ]
    elif None in (args.start_weight_decay, args.end_weight_decay):
        found.append(
            f"--weight-decay-incr-style {args.weight_decay_incr_style} needs --start-weight-decay "
            "and --end-weight-decay."
        )
    elif args.start_weight_decay > args.end_weight_decay:
        found.append(
            f"--start-weight-decay {args.start_weight_decay} and --end-weight-decay "
            f"{args.end_weight_decay}: weight decay grows."
        )
    return found


def _optimizer_problems(args: Namespace) -> list[str]:
    found = []
    if args.fp16 and args.bf16:
        found.append("--fp16 and --bf16: use one of them.")
    if args.fp32_residual_connection and not (args.fp16 or args.bf16):
        found.append("--fp32-residual-connection needs --bf16 or --fp16: all else is fp32 already.")
    if args.fp16_lm_cross_entropy:
        found.append("--fp16-lm-cross-entropy is not supported: the loss is computed in fp32.")
    if args.overlap_param_gather and not args.use_distributed_optimizer:
        found.append(
            "--overlap-param-gather needs --use-distributed-optimizer: there is nothing to gather."
        )
    if args.overlap_param_gather and not args.overlap_grad_reduce:
        found.append("--overlap-param-gather needs --overlap-grad-reduce.")
    if args.optimizer not in ("adam", "sgd"):
        found.append(f"--optimizer {args.optimizer} is not supported: use adam or sgd.")
    if args.optimizer == "sgd" and (args.save or args.load):
        found.append(
            "--optimizer sgd and --save or --load: Megatron 0.19.2 cannot load what it saved of "
            "it. Use adam, or drop them."
        )
    return found


def _model_problems(args: Namespace) -> list[str]:
    found = []
    if args.swiglu and args.squared_relu:
        found.append("--swiglu and --squared-relu: use one of them.")
    if args.swiglu and args.ffn_hidden_size is None and args.hidden_size is not None:
        width = int(args.hidden_size * 8 / 3 / 64) * 64
        if width == 0 or width % args.tensor_model_parallel_size:
            found.append(
                f"--swiglu with --hidden-size {args.hidden_size} makes an MLP of width {width}, "
                "not a positive multiple of --tensor-model-parallel-size "
                f"{args.tensor_model_parallel_size}: give --ffn-hidden-size."
            )
    if args.attention_backend is not None and args.attention_backend.name == "local":
        found.append("--attention-backend local is not supported: use --transformer-impl local.")
    if args.multi_latent_attention and args.group_query_attention:
        found.append(
            "--multi-latent-attention has no key/value heads: drop --group-query-attention."
        )
    if args.multi_latent_attention and args.position_embedding_type == "yarn":
        found.append(
            "--multi-latent-attention with --position-embedding-type yarn: Megatron's latent "
            "attention takes it as --position-embedding-type rope --rope-type yarn. Use these."
        )
    if args.position_embedding_type not in ("learned_absolute", "rope", "yarn", "none"):
        found.append(
            f"--position-embedding-type {args.position_embedding_type} is not supported: use rope, "
            "yarn, learned_absolute or none."
        )
    return found


def _rotary_problems(args: Namespace) -> list[str]:
    """Rotary positions turn pairs of numbers."""
    kind = "rope" if args.use_rotary_position_embeddings else args.position_embedding_type
    if kind not in ("rope", "yarn"):
        return []
    if args.multi_latent_attention:
        width = args.qk_pos_emb_head_dim
        return [f"--qk-pos-emb-head-dim {width} is odd: positions turn pairs."] if width % 2 else []
    hidden, heads = args.hidden_size, args.num_attention_heads
    if not args.kv_channels and not (hidden and heads and hidden % heads == 0):
        return []
    width = args.kv_channels or hidden // heads
    turned = width if kind == "yarn" else int(width * args.rotary_percent)
    if turned % 2 == 0:
        return []
    return [
        f"--position-embedding-type {kind} turns pairs, which heads of odd width {turned} have "
        "not: choose --kv-channels, or --hidden-size and --num-attention-heads, so that it is even "
        "(times --rotary-percent)."
    ]


def _expert_problems(args: Namespace) -> list[str]:
    if args.num_experts is None:
        return [
            f"--{name} needs --num-experts: the model is dense."
            for name, value in (
                ("moe-ffn-hidden-size", args.moe_ffn_hidden_size),
                ("moe-shared-expert-intermediate-size", args.moe_shared_expert_intermediate_size),
            )
            if value
        ]
    found = []
    if args.moe_router_topk > args.num_experts:
        found.append(
            f"--moe-router-topk {args.moe_router_topk} is above --num-experts {args.num_experts}."
        )
    if args.moe_token_dispatcher_type in ("allgather", "alltoall_seq"):
        found.append(
            f"--moe-token-dispatcher-type {args.moe_token_dispatcher_type} needs equal lengths on "
            "all ranks, and they differ here: use alltoall."
        )
    tp = args.tensor_model_parallel_size
    if tp > 1 and not args.sequence_parallel:
        found.append(
            f"--num-experts with --tensor-model-parallel-size {tp} needs --sequence-parallel: each "
            "rank routes its own part of the sequence."
        )
    found += _balancing_problems(args)
    if args.moe_router_group_topk and not args.moe_router_num_groups:
        found.append(
            f"--moe-router-group-topk {args.moe_router_group_topk} needs --moe-router-num-groups: "
            "the groups of experts to choose from."
        )
    layers = args.moe_layer_freq
    if isinstance(layers, list) and len(layers) != args.num_layers:
        found.append(
            f"--moe-layer-freq lists {len(layers)} layers, --num-layers is {args.num_layers}."
        )
    if args.moe_pad_expert_input_to_capacity and args.expert_model_parallel_size > 1:
        found.append(
            "--moe-pad-expert-input-to-capacity with --expert-model-parallel-size "
            f"{args.expert_model_parallel_size} needs equal lengths on all ranks, and they differ "
            "here: drop one of the two."
        )
    return found


def _balancing_problems(args: Namespace) -> list[str]:
    """Ways to balance experts that are another computation for another packing or layout."""
    kinds = args.moe_router_load_balancing_type
    kinds = kinds if isinstance(kinds, list) else [kinds]
    found = [
        f"--moe-router-load-balancing-type {kind} routes a token by the other tokens of its "
        "microbatch, so that no packing, layout or rollout equals another: use aux_loss, "
        "seq_aux_loss, global_aux_loss or none."
        for kind in kinds
        if kind in ("sinkhorn", "quantile_balancing")
    ]
    if args.packing and "seq_aux_loss" in kinds:
        found.append(
            "--moe-router-load-balancing-type seq_aux_loss with --packing: Megatron's experts see "
            "rows, and a packed row is many sequences. Use aux_loss, or drop --packing."
        )
    return found


def _tokenizer_problems(args: Namespace) -> list[str]:
    kind = args.tokenizer_type
    if kind not in TOKENIZERS:
        choices = ", ".join(f"{name} ({what})" for name, what in TOKENIZERS.items() if name)
        return [
            f"--tokenizer-type {kind} is not supported: use {choices}, or leave it out for "
            f"{TOKENIZERS[None]}."
        ]
    if kind == "HuggingFaceTokenizer" and args.tokenizer_model is None:
        return [
            "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model: its folder or name."
        ]
    size = args.vocab_size
    if kind is None and size is not None and size < BYTE_VOCABULARY:
        return [
            f"--vocab-size {size} is below the {BYTE_VOCABULARY} tokens of bytes: leave it out, or "
            "name a --tokenizer-type."
        ]
    padded = args.padded_vocab_size
    if padded is not None and padded < (size or BYTE_VOCABULARY):
        return [
            f"--padded-vocab-size {padded} is below the {size or BYTE_VOCABULARY} tokens "
            "(--vocab-size): use that or more."
        ]
    return []
