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

# The model and the warm start of the quickstart.
MODEL=(
  --num-layers 3 --hidden-size 96 --num-attention-heads 4 --ffn-hidden-size 384
  --position-embedding-type rope --rotary-base 1000 --normalization RMSNorm --disable-bias-linear
  --untie-embeddings-and-output-weights --init-method-std 0.1 --make-vocab-size-divisible-by 8
  --attention-dropout 0 --hidden-dropout 0 --seq-length 160 --packing --max-tokens-per-microbatch 2000
  --adam-beta2 0.95 --weight-decay 0.01 --seed "$SEED" --task-seed "$SEED"
)
# One update on each batch of 16 prompts x 8 episodes: what all algorithms allow.
REINFORCEMENT=(
  --group-size 8 --global-batch-size 128 --train-iters "$STEPS"
  --lr 4e-4 --min-lr 1e-4 --lr-decay-style linear --lr-warmup-iters 4
  --rollout-max-new-tokens 120 --rollout-slots 64 --eval-every "$STEPS" --eval-count 384
)

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
cd -- "$REPO_ROOT"
TRAIN=("$VENV_PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 pretrain_rl.py "${MODEL[@]}")
if [[ -z "${WARM_START:-}" ]]; then
  WARM_START="$OUTPUT_DIR/warm_start/checkpoints"
  "${TRAIN[@]}" --train-data arithmetic-demonstrations --global-batch-size 64 --train-iters 900 \
    --lr 3e-3 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 30 \
    --output-dir "$OUTPUT_DIR/warm_start" --save "$WARM_START" --load "$WARM_START"
fi
for algorithm in $ALGORITHMS; do
  "${TRAIN[@]}" "${REINFORCEMENT[@]}" --algorithm "$algorithm" --pretrained-checkpoint "$WARM_START" \
    --output-dir "$OUTPUT_DIR/$algorithm" "$@"
done
# shellcheck disable=SC2086
exec "$VENV_PYTHON" examples/algorithms_compared/table.py "$OUTPUT_DIR" $ALGORITHMS
