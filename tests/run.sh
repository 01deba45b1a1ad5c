#!/usr/bin/env bash
# Sets up .venv if needed and runs the tests.
#
#   bash tests/run.sh                      all of them
#   bash tests/run.sh -q                   the quick part: neither e2e nor slow
#   bash tests/run.sh tests/packing -x     any arguments of pytest; paths are relative to the repository root
#   bash tests/run.sh -n 0                 one after the other; as they come, files are spread over 3 or 4 processes
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=../tools/setup_env.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../tools/setup_env.sh"
setup_environment

workers="$(nproc)"
arguments=(-n "$((workers < 3 ? 3 : workers > 4 ? 4 : workers))" --dist loadfile --no-loadscope-reorder)
for argument in "$@"; do
  if [[ "$argument" == -q ]]; then
    arguments+=(-m "not e2e and not slow")
  else
    arguments+=("$argument")
  fi
done

# One thread a process: the tests run several ranks at once.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
cd -- "$REPO_ROOT"
exec "$VENV_PYTHON" -m pytest "${arguments[@]}"
