"""Validation: every mismatch has its one sentence, and what fits has none."""

from __future__ import annotations

import pytest

from megatron_ext.upstream.arguments import build_parser, check
from megatron_ext.upstream.machine import Machine, machine_defaults
from tests.upstream.cpu_runs import SMALL

NO_GPU = Machine(has_cuda=False, has_transformer_engine=False, has_apex=False)
BARE_GPU = Machine(has_cuda=True, has_transformer_engine=False, has_apex=False)
FULL_GPU = Machine(has_cuda=True, has_transformer_engine=True, has_apex=False)
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
EXPERTS = "--num-experts 4 --moe-router-topk 2"
SELECTIVE = "--recompute-granularity selective --recompute-modules"


def found(flags: str, *, world_size: int = 1, machine: Machine = NO_GPU) -> list[str]:
    """The problems of a command line on a machine."""
    parser, words = build_parser(machine), [*SMALL.split(), *flags.split()]
    args, bad_values, unknown = parser.read(words)
    assert not bad_values + unknown
    args.world_size = world_size
    _, wrong = check(args, given=parser.given(words), machine=machine)
    return wrong


REFUSED = {
    # flags: what the only sentence says
    "--tensor-model-parallel-size 0": "--tensor-model-parallel-size 0 must be at least 1",
    "--num-query-groups 0 --group-query-attention": "--num-query-groups 0 must be at least 1",
    "--pipeline-model-parallel-size 3 --num-layers 3": "4 ranks cannot hold replicas",
    "--expert-model-parallel-size 2": "--expert-model-parallel-size 2 needs --num-experts",
    f"{EXPERTS} --num-experts 3 --expert-model-parallel-size 2": "--num-experts 3 is not a",
    f"{EXPERTS} {TP2} --sequence-parallel --expert-model-parallel-size 4": (
        "4 ranks cannot hold experts cut by"
    ),
    f"{EXPERTS} --moe-router-topk 5": "--moe-router-topk 5 is above --num-experts 4",
    f"{EXPERTS} --moe-layer-freq [1]": "--moe-layer-freq lists 1 layers, --num-layers is 2",
    f"{EXPERTS} --moe-token-dispatcher-type allgather": "needs equal lengths on all ranks",
    f"{EXPERTS} --moe-router-load-balancing-type sinkhorn": "by the other tokens of its microbatch",
    f"{EXPERTS} --moe-router-load-balancing-type seq_aux_loss --packing": (
        "a packed row is many sequences"
    ),
    f"{EXPERTS} {TP2}": "needs --sequence-parallel",
    f"{EXPERTS} --moe-grouped-gemm": "--moe-grouped-gemm needs Transformer Engine",
    "--moe-ffn-hidden-size 8": "--moe-ffn-hidden-size needs --num-experts",
    f"{PP2} --num-layers 3": "--num-layers 3 is not a multiple of",
    f"{PP2} --num-layers-per-virtual-pipeline-stage 1 --num-layers 5": "Use 4 or 6",
    "--num-virtual-stages-per-pipeline-rank 2": "there is no pipeline to cut",
    f"{PP2} --num-layers-per-virtual-pipeline-stage 1 --num-virtual-stages-per-pipeline-rank 1": (
        "say the same in two ways"
    ),
    f"{PP2} --num-virtual-stages-per-pipeline-rank 1 "
    "--microbatch-group-size-per-virtual-pipeline-stage 1": "the pipeline would never fill",
    f"{TP2} --num-attention-heads 5 --kv-channels 8": "--num-attention-heads 5 is not a multiple",
    f"{TP2} --ffn-hidden-size 49": "--ffn-hidden-size 49 is not a multiple",
    f"{TP2} --sequence-parallel --seq-length 25": "--seq-length 25 is not a multiple",
    f"{TP2} --padded-vocab-size 251": "--padded-vocab-size 251 is not a multiple",
    "--sequence-parallel": "--sequence-parallel needs --tensor-model-parallel-size > 1",
    "--group-query-attention --num-query-groups 3": "--num-attention-heads 4 is not a multiple of",
    "--num-attention-heads 2 --hidden-size 30": "heads of odd width 15",
    "--multi-latent-attention --qk-pos-emb-head-dim 5": "--qk-pos-emb-head-dim 5 is odd",
    "--hidden-size 34": "--hidden-size 34 is not a multiple of --num-attention-heads = 4",
    "--global-batch-size 6": "--global-batch-size 6 is not a multiple of --micro-batch-size 1 x 4",
    "--max-position-embeddings 23": "--max-position-embeddings 23 is below --seq-length 24",
    "--save-interval 2": "--save-interval needs --save",
    "--save x --save-interval 0": "--save-interval 0 must be from 1",
    "--min-lr 1": "--min-lr 1.0 is above --lr 0.001",
    "--lr-warmup-iters 3": "--lr-warmup-iters 3 leaves no step of the 3",
    "--lr-warmup-iters 1 --lr-warmup-fraction 0.5": "say the same",
    "--lr-decay-style WSD": "--lr-decay-style WSD needs --lr-wsd-decay-iters",
    "--weight-decay -0.1": "--weight-decay -0.1 must be at least 0",
    "--start-weight-decay 0.1": "--start-weight-decay needs --weight-decay-incr-style",
    "--fp16 --bf16": "--fp16 and --bf16: use one of them",
    "--overlap-param-gather --overlap-grad-reduce": "needs --use-distributed-optimizer",
    "--adam-beta2 1": "--adam-beta2 1.0 must be at least 0 and below 1",
    "--hidden-dropout 1.5": "--hidden-dropout 1.5 must be at least 0 and below 1",
    "--optimizer sgd --save x": "cannot load what it saved",
    "--optimizer muon": "--optimizer muon is not supported: use adam or sgd",
    "--multi-latent-attention --position-embedding-type yarn": "rope --rope-type yarn",
    "--multi-latent-attention --group-query-attention --num-query-groups 2": "drop",
    "--tokenizer-type GPT2BPETokenizer": "use NullTokenizer (the same",
    "--tokenizer-type HuggingFaceTokenizer": "needs --tokenizer-model",
    "--padded-vocab-size 249": "--padded-vocab-size 249 is below the 250 tokens",
    "--scatter-gather-pipeline-tensors": "there is nothing to scatter",
    f"{TP2} {PP2} --sequence-parallel --scatter-gather-pipeline-tensors": "drop one of the two",
    "--packing --pad-rows-to-capacity --max-tokens-per-microbatch 25 --sequence-parallel "
    + TP2: "not a multiple of 2",
    f"{SELECTIVE} moe": "--recompute-modules moe needs --num-experts",
    f"{SELECTIVE} moe_act": "recomputes in the grouped experts of Transformer Engine",
    f"{SELECTIVE} mla_up_proj": "needs --multi-latent-attention",
    f"{EXPERTS} {SELECTIVE} shared_experts": "needs --moe-shared-expert-intermediate-size",
    "--recompute-modules mlp": "needs --recompute-granularity selective: nothing would",
    "--recompute-method uniform": "are of --recompute-granularity full",
    "--recompute-granularity full --recompute-method uniform": "needs --recompute-num-layers",
    "--context-parallel-size 2": "needs the attention of Transformer Engine",
    "--distributed-backend nccl": "--distributed-backend nccl needs a GPU: use gloo",
    "--fp8-format hybrid": "--fp8-format needs a GPU",
    "--use-precision-aware-optimizer": "needs Transformer Engine's Adam",
    "--mtp-num-layers 1": "--mtp-num-layers is not supported",
    "--yaml-cfg x": "--yaml-cfg is not supported: give flags",
    "--data-path x": "--data-path is not supported: samples come from --train-data",
    "--grpo-kl-beta 0.1": "--grpo-kl-beta is not supported: this is Megatron's own RL loop",
    "--ckpt-format torch": "torch_dist is the only choice",
    "--rerun-mode validate_results": "disabled is the only choice",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_a_mismatch_has_one_sentence(flags: str):
    sentences = found(flags, world_size=4)
    assert len(sentences) == 1, sentences
    assert REFUSED[flags] in sentences[0]
    assert sentences[0].endswith(".")
    assert "--" in sentences[0]


ACCEPTED = (
    ("", 1),
    (f"{TP2} {PP2}", 8),
    (f"{PP2} --num-layers 4 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 3", 2),
    (f"{TP2} --group-query-attention --num-query-groups 1", 2),
    (f"{EXPERTS} {TP2} --sequence-parallel --expert-model-parallel-size 2", 4),
    ("--decoder-first-pipeline-num-layers 3 --num-layers 4 " + PP2, 2),
    ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model .", 1),
    ("--save x --load y --optimizer adam --lr-warmup-iters 2", 1),
    ("--recompute-activations", 1),
    (f"{EXPERTS} {SELECTIVE} moe layernorm", 1),
)


@pytest.mark.parametrize(("flags", "world_size"), ACCEPTED)
def test_what_fits_has_no_problem(flags: str, world_size: int):
    assert found(flags, world_size=world_size) == []


def test_a_gpu_has_other_limits():
    assert found(TP2, machine=FULL_GPU, world_size=2) == []
    assert (
        found(
            "--moe-grouped-gemm --context-parallel-size 2 --fp8-format hybrid " + EXPERTS,
            machine=FULL_GPU,
            world_size=2,
        )
        == []
    )
    [adam] = found("--use-distributed-optimizer", machine=BARE_GPU)
    assert "Megatron 0.19.2 loads its own checkpoints wrongly" in adam
    [norm] = found(f"{SELECTIVE} core_attn layernorm", machine=BARE_GPU)
    assert "--recompute-modules layernorm makes Megatron 0.19.2 die in a NameError" in norm
    [engine] = found("--transformer-impl transformer_engine", machine=BARE_GPU)
    assert "install the gpu extra" in engine


def test_defaults_of_a_full_machine_are_megatrons_but_for_ours():
    defaults = machine_defaults(FULL_GPU)
    assert defaults["calculate_per_token_loss"]
    assert "transformer_impl" not in defaults
    assert "distributed_backend" not in machine_defaults(BARE_GPU)
    assert machine_defaults(NO_GPU)["distributed_backend"] == "gloo"
