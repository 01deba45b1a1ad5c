#!/usr/bin/env bash
# Sets up .venv if needed and runs the quick-start job on two CPU processes.
#
#   bash examples/quickstart/run.sh                     results in outputs/quickstart
#   OUTPUT_DIR=/some/folder bash examples/quickstart/run.sh
#   bash examples/quickstart/run.sh --train-iters 5     more flags go to pretrain_rl.py, after those below
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=../../tools/setup_env.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../../tools/setup_env.sh"
setup_environment
output_folder outputs/quickstart

# A Llama of 0.75 million parameters on two tensor-parallel ranks, trained on the text beside this file.
FLAGS=(
  --train-data examples/quickstart/text.txt
  --num-layers 4 --hidden-size 128 --num-attention-heads 8 --ffn-hidden-size 352
  --group-query-attention --num-query-groups 2
  --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
  --attention-dropout 0 --hidden-dropout 0
  --seq-length 128 --micro-batch-size 8 --global-batch-size 16 --train-iters 120
  --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 10 --adam-beta2 0.95
  --tensor-model-parallel-size 2 --sequence-parallel
  --output-dir "$OUTPUT_DIR"
  --save "$OUTPUT_DIR/checkpoints" --load "$OUTPUT_DIR/checkpoints" --save-interval 50
)

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
cd -- "$REPO_ROOT"
exec "$VENV_PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 pretrain_rl.py "${FLAGS[@]}" "$@"
