#!/usr/bin/env bash
# Trains one warm policy by GRPO and by Dr. GRPO, both without a KL term, and prints how long their answers became.
#
#   bash examples/dr_grpo_vs_grpo/run.sh               results in outputs/dr_grpo_vs_grpo
#   STEPS=60 SEED=2 WARM_START=/some/checkpoints OUTPUT_DIR=/some/folder bash examples/dr_grpo_vs_grpo/run.sh
#   bash examples/dr_grpo_vs_grpo/run.sh --lr 1e-4     more flags go to both runs
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=../../tools/setup_env.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../../tools/setup_env.sh"
setup_environment
output_folder outputs/dr_grpo_vs_grpo

cd -- "$REPO_ROOT"
export OUTPUT_DIR STEPS="${STEPS:-30}" ALGORITHMS="grpo dr-grpo"
bash examples/algorithms_compared/run.sh --kl-coefficient 0 "$@"
exec "$VENV_PYTHON" examples/dr_grpo_vs_grpo/lengths.py "$OUTPUT_DIR/grpo" "$OUTPUT_DIR/dr-grpo"
