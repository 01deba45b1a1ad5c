"""Train a policy on Megatron-Core: parse, layout, model, loop.

    torchrun --nproc-per-node 2 pretrain_rl.py --train-data text.txt --num-layers 2 ...

``--help`` lists every option; README.md shows complete commands.
"""

from __future__ import annotations

import logging
import math
import sys
import time
import warnings
from collections.abc import Sequence
from functools import partial

import torch

from megatron_ext.data.config import DEMONSTRATIONS
from megatron_ext.data.dataset import Dataset, open_tokenizer, read_dataset
from megatron_ext.data.order import SampleOrder
from megatron_ext.environments.arithmetic_samples import DemonstrationSamples
from megatron_ext.packing.batch import Sample
from megatron_ext.packing.plan import StepPlan, plan_step
from megatron_ext.report.recorder import RunRecorder
from megatron_ext.rewards.verifiers import Verifiers
from megatron_ext.upstream import checkpoint
from megatron_ext.upstream.arguments import Options, build_parser, parse
from megatron_ext.upstream.checkpoint_source import find_source
from megatron_ext.upstream.cpu import device_mode, peak_memory_bytes
from megatron_ext.upstream.hf_weights import filler
from megatron_ext.upstream.layout import Layout, close_layout, open_layout
from megatron_ext.upstream.learner import MegatronLearner
from megatron_ext.upstream.microbatches import replica_of, to_device
from megatron_ext.upstream.model import build_trainable
from megatron_ext.upstream.rl_run import open_loop, tasks_id
from megatron_ext.upstream.step import Stepper, build_stepper
from megatron_ext.upstream.update import update


def main(argv: Sequence[str] | None = None) -> None:
    """Run one training job; every rank calls it."""
    with device_mode():
        options = parse(argv)
        layout = open_layout(options.megatron)
        run = train if options.algorithm.algorithm == "sft" else reinforce
        run(options, layout)
        close_layout()


def train(options: Options, layout: Layout) -> None:
    """Steps of sample, plan, forward-backward, update, validate, record and save."""
    args = options.megatron
    try:
        data, valid = read_data(options, layout)
        stepper, start = open_model(options, layout, samples_id=data.identity)
    except (OSError, ValueError) as error:
        logging.getLogger(__name__).debug("refused", exc_info=True)
        build_parser().refuse([str(error)])
    order = SampleOrder(num_samples=len(data.samples), seed=args.seed)
    with open_recorder(options, layout, start=start) as recorder:
        consumed = start.consumed_samples
        for step in range(start.step + 1, args.train_iters + 1):
            batch = [data.samples[i] for i in order.take(consumed, args.global_batch_size)]
            metrics = train_step(options, stepper, batch=batch)
            consumed += args.global_batch_size
            metrics["epoch"] = consumed / len(data.samples)
            if data.bad_lines:
                metrics["skipped_lines"] = len(data.bad_lines)
            is_last = step == args.train_iters
            if valid and (is_last or is_due(step, args.eval_interval)):
                metrics |= validate(options, stepper, samples=valid.samples)
            recorder.log(step, metrics)
            save(options, stepper, step=step, consumed=consumed, samples_id=data.identity)


def reinforce(options: Options, layout: Layout) -> None:
    """Steps of roll out, score, learn, evaluate, record and save."""
    args, samples_id = options.megatron, tasks_id(options)
    with Verifiers(options.rewards) as verify:
        try:
            stepper, start = open_model(options, layout, samples_id=samples_id)
            learner = MegatronLearner(options, stepper, is_new=start.step == 0)
            recorder = open_recorder(options, layout, start=start)
            loop = open_loop(options, learner, verify=verify, resume_step=start.step or None)
        except (OSError, ValueError) as error:
            logging.getLogger(__name__).debug("refused", exc_info=True)
            build_parser().refuse([str(error)])
        with recorder:
            consumed = start.consumed_samples
            if start.step == 0 and (found := loop.evaluate(0)):
                recorder.log(0, found)
            for step in range(start.step + 1, args.train_iters + 1):
                metrics = loop.step(step, consumed=consumed)
                consumed += args.global_batch_size
                if loop.is_evaluated(step, last=args.train_iters):
                    metrics |= loop.evaluate(step)
                recorder.log(step, metrics | {"peak_memory_bytes": peak_memory_bytes()})
                save(options, stepper, step=step, consumed=consumed, samples_id=samples_id)


def open_recorder(options: Options, layout: Layout, *, start: checkpoint.Progress) -> RunRecorder:
    """What records the run's metrics, on the writing rank."""
    args = options.megatron
    return RunRecorder(
        options.report,
        is_writer=layout.is_writer,
        options=options.as_record(),
        total_steps=args.train_iters,
        resume_step=start.step or None,
        world_size=args.world_size,
        wandb_project=args.wandb_project or None,
        wandb_name=args.wandb_exp_name or None,
    )


def save(options: Options, stepper: Stepper, *, step: int, consumed: int, samples_id: str) -> None:
    """Save a checkpoint after a step that --save-interval, or the end, asks for one."""
    args = options.megatron
    if args.save and (step == args.train_iters or is_due(step, args.save_interval)):
        checkpoint.save(
            args,
            stepper.model,
            stepper.layout,
            progress=checkpoint.Progress(step=step, consumed_samples=consumed),
            samples_id=samples_id,
            keep=options.checkpoint.keep_checkpoints,
        )


def open_model(
    options: Options, layout: Layout, *, samples_id: str
) -> tuple[Stepper, checkpoint.Progress]:
    """The model with its optimizer, from a checkpoint, from --hf-model or new, and where it is."""
    args = options.megatron
    is_new = find_source(args) is None
    model = build_trainable(args, layout, fill=filler(args, layout) if is_new else None)
    start = checkpoint.resume(args, model, layout, samples_id=samples_id)
    return build_stepper(options, model=model, layout=layout), start


def is_due(step: int, interval: int | None) -> bool:
    """Whether something done every `interval` steps is done after this one; None = never."""
    return bool(interval) and step % interval == 0


def read_data(options: Options, layout: Layout) -> tuple[Dataset, Dataset | None]:
    """The samples of --train-data and of --valid-data, tokenised."""
    args, data = options.megatron, options.data
    tokenizer = open_tokenizer(
        kind=args.tokenizer_type,
        model=args.tokenizer_model,
        chat_template=args.chat_template,
        tool_call_format=data.tool_call_format,
    )
    longest = min(args.seq_length, options.packing.row_capacity(seq_length=args.seq_length))
    read = partial(
        read_dataset,
        tokenizer=tokenizer,
        config=data,
        seq_length=args.seq_length,
        vocab_size=args.vocab_size,
        longest=longest if options.packing.overlong == "error" else None,
        is_reporter=layout.is_writer,
    )
    valid = read(data.valid_data, flag="--valid-data") if data.valid_data else None
    if data.train_data == DEMONSTRATIONS:
        drawn = DemonstrationSamples(
            count=args.train_iters * args.global_batch_size, seed=options.environments.task_seed
        )
        return Dataset(samples=drawn, line_numbers=[], name=drawn.identity), valid
    return read(data.train_data), valid


def train_step(options: Options, stepper: Stepper, *, batch: list[Sample]) -> dict[str, float]:
    """One step over a global batch of samples; its metrics, the same on every rank."""
    args, layout = options.megatron, stepper.layout
    started = time.perf_counter()
    plan = plan_of(options, layout, samples=batch, global_batch_size=args.global_batch_size)
    result = stepper.forward_backward(to_device(plan.microbatches))
    if not result.num_trained and layout.is_writer:
        logging.getLogger(__name__).warning(
            "no token of this step is trained: its samples have no assistant's turn, or --overlong "
            "%s at --seq-length %d left none of it",
            options.packing.overlong,
            args.seq_length,
        )
    changed = update(stepper.model, layout, num_samples=args.global_batch_size)
    sent: dict[str, float] = {}
    if layout.pp_size > 1:
        sent["pipeline_sent_bytes"] = result.pipeline_sent_bytes
    return sent | {
        "loss": result.loss,
        "grad_norm": changed.grad_norm,
        "lr": changed.learning_rate,
        "tokens": plan.num_tokens,
        "trained_tokens": result.num_trained,
        "padding_share": 1 - plan.num_tokens / result.num_positions,
        "truncated_samples": plan.num_truncated,
        "dropped_samples": plan.num_dropped,
        "seconds": time.perf_counter() - started,
        "peak_memory_bytes": peak_memory_bytes(),
    }


def validate(options: Options, stepper: Stepper, *, samples: Sequence[Sample]) -> dict[str, float]:
    """The loss over all validation samples by the law of training; the same on every rank."""
    plan = plan_of(options, stepper.layout, samples=samples, global_batch_size=len(samples))
    stepper.model.settle_parameters()
    for chunk in stepper.model.chunks:
        chunk.eval()
    with torch.no_grad():
        result = stepper.forward_backward(to_device(plan.microbatches), forward_only=True)
    for chunk in stepper.model.chunks:
        chunk.train()
    found = {"valid_loss": result.loss, "valid_tokens": result.num_trained}
    if options.packing.loss_normalization == "global-token-mean":
        found["valid_perplexity"] = math.exp(min(result.loss, 700.0))  # the largest exponent
    return found


def plan_of(
    options: Options, layout: Layout, *, samples: Sequence[Sample], global_batch_size: int
) -> StepPlan:
    """This rank's microbatches of the samples."""
    args = options.megatron
    return plan_step(
        samples,
        options.packing,
        replica=replica_of(layout, options),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        global_batch_size=global_batch_size,
    )


def quiet_libraries() -> None:
    """Leave out what Megatron and torch say of their own deprecations, once per rank and step."""
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    warnings.filterwarnings("ignore", module="megatron")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    for name in ("megatron.core.models.gpt", "megatron.core.dist_checkpointing"):
        logging.getLogger(name).setLevel(logging.ERROR)


if __name__ == "__main__":
    quiet_libraries()
    sys.exit(main())
