#!/usr/bin/env bash
# Sets up .venv if needed and compares local with global loss normalisation on one CPU process.
#
#   bash examples/loss_normalization/run.sh        results in outputs/loss_normalization
#   OUTPUT_DIR=/some/folder bash examples/loss_normalization/run.sh
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=../../tools/setup_env.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../../tools/setup_env.sh"
setup_environment
output_folder outputs/loss_normalization

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
cd -- "$REPO_ROOT"
exec "$VENV_PYTHON" -W ignore -m torch.distributed.run --standalone --nproc-per-node 1 \
  examples/loss_normalization/loss_normalization.py --output-dir "$OUTPUT_DIR" "$@"
