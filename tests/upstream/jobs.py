"""What a rank does in the layout tests: a tiny model, one fixed batch, three updates."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from megatron_ext.packing.batch import Sample
from megatron_ext.packing.plan import plan_step
from megatron_ext.upstream.arguments import Options, parse
from megatron_ext.upstream.checkpoint import load_weights, save_weights
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.layout import Layout, open_layout
from megatron_ext.upstream.microbatches import replica_of
from megatron_ext.upstream.model import TrainableModel, build_trainable
from megatron_ext.upstream.step import Stepper, build_stepper
from megatron_ext.upstream.update import update

VOCAB_SIZE = 250
SEQ_LENGTH = 24
DENSE = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --group-query-attention "
    f"--num-query-groups 2 --ffn-hidden-size 48 --seq-length {SEQ_LENGTH} "
    f"--vocab-size {VOCAB_SIZE} "
    "--tokenizer-type NullTokenizer --position-embedding-type rope --swiglu "
    "--normalization RMSNorm --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 "
    "--init-method-std 0.1 "
    "--train-iters 3 --lr 1e-3 --adam-eps 1e-5 --global-batch-size 8 --clip-grad 0.5 --seed 5"
).split()
LLAMA = [*DENSE, "--untie-embeddings-and-output-weights"]
DEEP = [*LLAMA, "--num-layers", "8"]
MOE = [
    *LLAMA,
    *["--num-experts", "4", "--moe-router-topk", "2", "--moe-router-load-balancing-type", "none"],
]


def fixed_batch() -> list[Sample]:
    """Eight ragged sequences of 3 to 24 tokens, half of whose tokens are trained."""
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(3, SEQ_LENGTH + 1, (8,), generator=generator).tolist()
    return [
        Sample(
            tokens=torch.randint(0, VOCAB_SIZE, (n,), generator=generator),
            mask=torch.rand(n, generator=generator) < 0.5,
        )
        for n in lengths
    ]


def build(flags: list[str]) -> tuple[Options, Layout, TrainableModel, Stepper]:
    """Everything a training step needs, on this rank; call it inside ``device_mode()``."""
    options = parse(flags)
    layout = open_layout(options.megatron)
    model = build_trainable(options.megatron, layout)
    return options, layout, model, build_stepper(options, model=model, layout=layout)


def forward_backward(options: Options, stepper: Stepper, batch: list[Sample]) -> float:
    """The loss of a step over ``batch``; gradients stay in Megatron's buffers."""
    args = options.megatron
    plan = plan_step(
        batch,
        options.packing,
        replica=replica_of(stepper.layout, options),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        global_batch_size=args.global_batch_size,
    )
    return stepper.forward_backward(plan.microbatches).loss


def gather_sharded_gradients(model: TrainableModel) -> None:
    """Complete the buffers of which the distributed optimizer leaves each rank its shard."""
    for chunk in model.chunks:
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            data_group = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                shards = bucket.grad_data.chunk(data_group.size())
                mine = shards[data_group.rank()].clone()
                dist.all_gather(list(shards), mine, group=data_group)


def save_gradients(model: TrainableModel, layout: Layout, folder: Path) -> None:
    """Write the gradients where the weights would be, so that any layout's can be compared."""
    kept = [p.detach().clone() for chunk in model.chunks for p in chunk.parameters()]
    with torch.no_grad():
        for chunk in model.chunks:
            for parameter in chunk.parameters():
                parameter.copy_(parameter.main_grad)
    save_weights(model.bare_chunks, layout, folder=folder)
    with torch.no_grad():
        parameters = [p for chunk in model.chunks for p in chunk.parameters()]
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)


def save_initial_weights(flags: list[str], folder: Path) -> None:
    """The weights that every layout starts from, norms included, none of them trivial."""
    with device_mode():
        _, layout, model, _ = build(flags)
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for chunk in model.chunks:
                for parameter in chunk.parameters():
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.add_(noise, alpha=0.02)
        save_weights(model.bare_chunks, layout, folder=folder)


def train_from(flags: list[str], initial: Path, out: Path) -> dict[str, object]:
    """Gradients of the fixed batch, then three updates over it; tensors go to ``out``."""
    with device_mode():
        options, layout, model, stepper = build(flags)
        load_weights(model.bare_chunks, layout, folder=initial)
        model.optimizer.reload_model_params()
        losses, norms = [], []
        for step in range(3):
            losses.append(forward_backward(options, stepper, fixed_batch()))
            if step == 0:
                if options.megatron.use_distributed_optimizer:
                    gather_sharded_gradients(model)
                save_gradients(model, layout, out / "gradients")
            norms.append(update(model, layout, num_samples=8).grad_norm)
        model.settle_parameters()
        save_weights(model.bare_chunks, layout, folder=out / "weights")
        return {
            "losses": losses,
            "norms": norms,
            "sent_bytes": stepper.communicator.traffic.sent_bytes,
        }


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Whole tensors of a weights folder; needs a process group (one rank is enough)."""
    with device_mode():
        found = dist_checkpointing.load_plain_tensors(str(folder))
    return {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}
