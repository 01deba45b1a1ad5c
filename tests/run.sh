#!/usr/bin/env bash
# Sets up .venv if needed and runs the tests.
#
#   bash tests/run.sh                      all of them
#   bash tests/run.sh -q                   the quick part: neither e2e nor slow
#   bash tests/run.sh tests/packing -x     any arguments of pytest; paths are relative to the repository root
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=../tools/setup_env.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../tools/setup_env.sh"
setup_environment

arguments=()
for argument in "$@"; do
  if [[ "$argument" == -q ]]; then
    arguments=(-m "not e2e and not slow" ${arguments[@]+"${arguments[@]}"})
  else
    arguments+=("$argument")
  fi
done

# One thread a process: the tests run several ranks at once.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
cd -- "$REPO_ROOT"
exec "$VENV_PYTHON" -m pytest ${arguments[@]+"${arguments[@]}"}
