#!/usr/bin/env bash
# Sets up .venv if needed, then teaches a tiny policy to calculate on two CPU processes: a warm start by
# supervision on demonstrations, then reinforcement learning, then the report.
#
#   bash examples/quickstart/run.sh                     results in outputs/quickstart
#   SEED=2 OUTPUT_DIR=/some/folder bash examples/quickstart/run.sh
#   bash examples/quickstart/run.sh --algorithm rloo --batch-epochs 1
#                                                       more flags go to the second job, after those below
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=../../tools/setup_env.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../../tools/setup_env.sh"
setup_environment
output_folder outputs/quickstart
SEED="${SEED:-1}"
WARM_START="$OUTPUT_DIR/warm_start"

# A transformer of 0.34 million parameters on two data-parallel ranks.  The tokens are the 38 characters of
# the built-in tasks; the large initial weights let it learn to copy early.
MODEL=(
  --num-layers 3 --hidden-size 96 --num-attention-heads 4 --ffn-hidden-size 384
  --position-embedding-type rope --rotary-base 1000 --normalization RMSNorm --disable-bias-linear
  --untie-embeddings-and-output-weights --init-method-std 0.1 --make-vocab-size-divisible-by 8
  --attention-dropout 0 --hidden-dropout 0 --seq-length 160 --packing --max-tokens-per-microbatch 2000
  --adam-beta2 0.95 --weight-decay 0.01 --seed "$SEED" --task-seed "$SEED"
)
DEMONSTRATIONS=(
  --train-data arithmetic-demonstrations --global-batch-size 64 --train-iters 900
  --lr 3e-3 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 30
  --output-dir "$WARM_START" --save "$WARM_START/checkpoints" --load "$WARM_START/checkpoints"
)
# 30 steps of 16 prompts x 8 episodes: 3,840 episodes.
REINFORCEMENT=(
  --algorithm grpo-plus --zero-variance-groups drop --group-size 8 --global-batch-size 128 --batch-epochs 2
  --train-iters 30 --lr 2e-4 --min-lr 4e-5 --lr-decay-style linear --lr-warmup-iters 4
  --rollout-max-new-tokens 120 --rollout-slots 64 --eval-every 15 --eval-count 384
  --pretrained-checkpoint "$WARM_START/checkpoints"
  --output-dir "$OUTPUT_DIR" --save "$OUTPUT_DIR/checkpoints" --load "$OUTPUT_DIR/checkpoints" --save-interval 10
)

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
cd -- "$REPO_ROOT"
TRAIN=("$VENV_PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 pretrain_rl.py "${MODEL[@]}")
"${TRAIN[@]}" "${DEMONSTRATIONS[@]}"
exec "${TRAIN[@]}" "${REINFORCEMENT[@]}" "$@"
