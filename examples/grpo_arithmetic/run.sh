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

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
cd -- "$REPO_ROOT"
source examples/algorithms_compared/policy.sh
warm_start
# 60 steps of 8 prompts x 8 episodes: 3,840 episodes, one update on each batch.
train "$RANKS" "${LAYOUT[@]}" --algorithm grpo --group-size 8 --global-batch-size 64 --train-iters "${STEPS:-60}" \
  --lr 2e-4 --min-lr 4e-5 --lr-decay-style linear --lr-warmup-iters 4 \
  --rollout-max-new-tokens 120 --rollout-slots 64 --eval-every 20 --eval-count 384 \
  --pretrained-checkpoint "$WARM_START" \
  --output-dir "$OUTPUT_DIR" --save "$OUTPUT_DIR/checkpoints" --load "$OUTPUT_DIR/checkpoints" --save-interval 20 "$@"
exec "$VENV_PYTHON" examples/grpo_arithmetic/table.py "$OUTPUT_DIR"
