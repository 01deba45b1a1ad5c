#!/usr/bin/env bash
# Text-book GRPO (sample mean, group deviation, KL to the first policy) on the built-in tasks, on a layout of your choice.
#
#   bash examples/grpo_arithmetic/run.sh                two data-parallel ranks; results in outputs/grpo_arithmetic
#   RANKS=2 LAYOUT="--tensor-model-parallel-size 2 --sequence-parallel" bash examples/grpo_arithmetic/run.sh
#   STEPS=20 SEED=2 WARM_START=/some/checkpoints OUTPUT_DIR=/some/folder bash examples/grpo_arithmetic/run.sh --lr 1e-4
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=../../tools/setup_env.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../../tools/setup_env.sh"
setup_environment
output_folder outputs/grpo_arithmetic
SEED="${SEED:-1}"
RANKS="${RANKS:-2}"
read -ra LAYOUT <<<"${LAYOUT:-}"

# The model and the warm start of the quickstart; a checkpoint loads on any layout.
MODEL=(
  --num-layers 3 --hidden-size 96 --num-attention-heads 4 --ffn-hidden-size 384
  --position-embedding-type rope --rotary-base 1000 --normalization RMSNorm --disable-bias-linear
  --untie-embeddings-and-output-weights --init-method-std 0.1 --make-vocab-size-divisible-by 8
  --attention-dropout 0 --hidden-dropout 0 --seq-length 160 --packing --max-tokens-per-microbatch 2000
  --adam-beta2 0.95 --weight-decay 0.01 --seed "$SEED" --task-seed "$SEED"
)

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
cd -- "$REPO_ROOT"
train() { "$VENV_PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$1" pretrain_rl.py "${MODEL[@]}" "${@:2}"; }
if [[ -z "${WARM_START:-}" ]]; then
  WARM_START="$OUTPUT_DIR/warm_start/checkpoints"
  train 2 --train-data arithmetic-demonstrations --global-batch-size 64 --train-iters 900 \
    --lr 3e-3 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 30 \
    --output-dir "$OUTPUT_DIR/warm_start" --save "$WARM_START" --load "$WARM_START"
fi
# 60 steps of 8 prompts x 8 episodes: 3,840 episodes, one update on each batch.
train "$RANKS" "${LAYOUT[@]}" --algorithm grpo --group-size 8 --global-batch-size 64 --train-iters "${STEPS:-60}" \
  --lr 2e-4 --min-lr 4e-5 --lr-decay-style linear --lr-warmup-iters 4 \
  --rollout-max-new-tokens 120 --rollout-slots 64 --eval-every 20 --eval-count 384 \
  --pretrained-checkpoint "$WARM_START" \
  --output-dir "$OUTPUT_DIR" --save "$OUTPUT_DIR/checkpoints" --load "$OUTPUT_DIR/checkpoints" --save-interval 20 "$@"
