#!/usr/bin/env bash
# Sets up .venv if needed and computes the packing numbers of this folder's README.
#
#   bash examples/packing_numbers/run.sh        results in outputs/packing_numbers
#   OUTPUT_DIR=/some/folder bash examples/packing_numbers/run.sh
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=../../tools/setup_env.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../../tools/setup_env.sh"
setup_environment
output_folder outputs/packing_numbers

cd -- "$REPO_ROOT"
exec "$VENV_PYTHON" examples/packing_numbers/packing_numbers.py --output-dir "$OUTPUT_DIR" "$@"
