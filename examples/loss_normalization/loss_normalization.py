"""What a mean of microbatch means does to the gradient of a policy, through the real step.

The objective is REINFORCE, -advantage * log-prob, over 64 episodes in four microbatches of 16.
A microbatch is one packed row, so local normalisation is the mode `row-mean`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import torch
from torch import Tensor

from megatron_ext.packing import Microbatch, RowLayout, Sample, build_microbatches, loss_weights
from megatron_ext.packing.config import LossNormalization
from megatron_ext.packing.weights import local_mean_token_weights
from megatron_ext.upstream.arguments import parse
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.layout import close_layout, open_layout
from megatron_ext.upstream.microbatches import to_device
from megatron_ext.upstream.model import build_trainable
from megatron_ext.upstream.step import Stepper, build_stepper
from pretrain_rl import quiet_libraries

matplotlib.use("Agg")
from matplotlib import pyplot

SIXTEENS = (
    [6] * 16,
    [7] * 16,
    [8, 8, 9, 9, 10, 10, 11, 11, 11, 12, 12, 13, 13, 14, 14, 15],
    [15, 15, 16, 17, 18, 18, 19, 20, 21, 22, 24, 25, 27, 30, 33, 35],
)
"""Policy tokens of the episodes; the sums are those of seed document 000, sorted by length."""
KINDS: dict[str, LossNormalization] = {"local": "row-mean", "global": "global-token-mean"}
TURN = 6
VOCAB_SIZE = 64
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention "
    f"--num-query-groups 2 --ffn-hidden-size 128 --seq-length 128 --vocab-size {VOCAB_SIZE} "
    "--tokenizer-type NullTokenizer --position-embedding-type rope --swiglu "
    "--normalization RMSNorm --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 "
    "--init-method-std 0.1 --train-iters 1 --lr 1e-3 --global-batch-size 64 --seed 1"
).split()


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table and write it to OUTPUT_DIR."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, required=True)
    folder = parser.parse_args(argv).output_dir
    folder.mkdir(parents=True, exist_ok=True)
    quiet_libraries()
    with device_mode():
        options = parse(MODEL)
        layout = open_layout(options.megatron)
        model = build_trainable(options.megatron, layout)
        numbers = compare(build_stepper(options, model=model, layout=layout))
        close_layout()
    (folder / "loss_normalization.json").write_text(json.dumps(numbers, indent=2) + "\n")
    draw(numbers, folder / "loss_normalization.png")
    sys.stdout.write(as_text(numbers) + f"\nwritten to {folder}\n")


def compare(stepper: Stepper) -> dict[str, dict]:
    """Each split and normalisation against one microbatch of everything."""
    samples = episodes()
    everything = list(range(len(samples)))
    shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(0)).tolist()
    splits = {
        name: [order[i : i + 16] for i in range(0, 64, 16)]
        for name, order in {"random": shuffled, "length-sorted": everything}.items()
    }
    plain = gradient(stepper, samples, [everything], mode="global-token-mean")
    found = {}
    for name, microbatches in splits.items():
        tokens = [sum(int(samples[i].mask.sum()) for i in members) for members in microbatches]
        found[name] = {"policy_tokens": tokens, "token_weights": local_mean_token_weights(tokens)}
        for kind, mode in KINDS.items():
            mine = gradient(stepper, samples, microbatches, mode=mode)
            found[name][kind] = {
                "relative_error": float((mine - plain).norm() / plain.norm()),
                "cosine": float(torch.cosine_similarity(mine, plain, dim=0)),
            }
    return found


def episodes() -> list[Sample]:
    """64 episodes, shortest first: a prompt, then turns of the policy and of its tools."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for policy_tokens in (n for sixteen in SIXTEENS for n in sixteen):
        mask = [False] * TURN
        for start in range(0, policy_tokens, TURN):
            mask += [True] * min(TURN, policy_tokens - start) + [False] * TURN
        advantage = torch.randn((), generator=generator)
        samples.append(
            Sample(
                tokens=torch.randint(VOCAB_SIZE, (len(mask),), generator=generator),
                mask=torch.tensor(mask),
                extras={"advantage": advantage.expand(len(mask))},
            )
        )
    return samples


def gradient(
    stepper: Stepper,
    samples: Sequence[Sample],
    microbatches: Sequence[Sequence[int]],
    *,
    mode: LossNormalization,
) -> Tensor:
    """The gradient of one step as one vector, float64."""
    loss = loss_weights([s.mask for s in samples], microbatches=microbatches, mode=mode)
    layout = RowLayout(extras={"advantage": torch.float32})
    built = build_microbatches(samples, microbatches=microbatches, loss=loss, layout=layout)
    stepper.forward_backward(to_device(built), reinforce)
    chunks = stepper.model.chunks
    return torch.cat([p.main_grad.flatten().double() for c in chunks for p in c.parameters()])


def reinforce(logprobs_BS: Tensor, microbatch: Microbatch) -> Tensor:
    """Per-token policy-gradient loss."""
    return -microbatch.extras["advantage"] * logprobs_BS


def as_text(numbers: dict[str, dict]) -> str:
    """One line a split and normalisation, and what local weighs a token of each microbatch."""
    lines = []
    for name, split in numbers.items():
        lines += [
            f"{name:<13} {kind:<6} | policy tokens {split['policy_tokens']} | relative error "
            f"{split[kind]['relative_error']:.1e} | cosine {split[kind]['cosine']:.4f}"
            for kind in KINDS
        ]
        weights = [round(weight, 2) for weight in split["token_weights"]]
        lines.append(f"{name:<13} local  | weight of a token against the right one: {weights}")
    return "\n".join(lines)


def draw(numbers: dict[str, dict], file: Path) -> None:
    """Token weights of local normalisation, and the errors of both."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2))
    for offset, (name, split) in enumerate(numbers.items()):
        places = [place + 0.35 * offset for place in range(4)]
        left.bar(places, split["token_weights"], width=0.33, label=f"{name}, local")
    left.axhline(1.0, color="black", linewidth=1, label="global")
    left.set_xticks([place + 0.17 for place in range(4)], ["1", "2", "3", "4"])
    left.set_xlabel("microbatch")
    left.set_ylabel("weight of a token")
    left.legend(fontsize=8)
    names = [f"{name}\n{kind}" for name in numbers for kind in KINDS]
    errors = [numbers[n][k]["relative_error"] for n in numbers for k in KINDS]
    right.bar(names, errors, color="#c44e52")
    right.set_yscale("log")
    right.set_ylabel("relative error of the gradient")
    right.tick_params(labelsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
