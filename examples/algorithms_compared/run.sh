#!/usr/bin/env bash
# Trains one warm policy by every algorithm for the same number of episodes, and prints one table.
#
#   bash examples/algorithms_compared/run.sh            results in outputs/algorithms_compared
#   STEPS=30 SEED=2 WARM_START=/some/checkpoints OUTPUT_DIR=/some/folder bash examples/algorithms_compared/run.sh
#   bash examples/algorithms_compared/run.sh --lr 1e-4  more flags go to every run, after those below
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=../../tools/setup_env.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../../tools/setup_env.sh"
setup_environment
output_folder outputs/algorithms_compared
SEED="${SEED:-1}"
STEPS="${STEPS:-15}"
ALGORITHMS="${ALGORITHMS:-reinforce rloo grpo grpo-plus grpo-tis dapo dr-grpo ppo decoupled-ppo importance-sampling gspo cispo}"

# One update on each batch of 16 prompts x 8 episodes: what all algorithms allow.
REINFORCEMENT=(
  --group-size 8 --global-batch-size 128 --train-iters "$STEPS"
  --lr 4e-4 --min-lr 1e-4 --lr-decay-style linear --lr-warmup-iters 4
  --rollout-max-new-tokens 120 --rollout-slots 64 --eval-every "$STEPS" --eval-count 384
)

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
cd -- "$REPO_ROOT"
source examples/algorithms_compared/policy.sh
warm_start
for algorithm in $ALGORITHMS; do
  train 2 "${REINFORCEMENT[@]}" --algorithm "$algorithm" --pretrained-checkpoint "$WARM_START" \
    --output-dir "$OUTPUT_DIR/$algorithm" "$@"
done
# shellcheck disable=SC2086
exec "$VENV_PYTHON" examples/algorithms_compared/table.py "$OUTPUT_DIR" $ALGORITHMS
