#!/usr/bin/env bash
# Sets up .venv if needed and runs the tests.
#
#   bash tests/run.sh                      all of them
#   bash tests/run.sh -q                   the quick part: neither e2e nor slow
#   bash tests/run.sh tests/packing -x     any arguments of pytest; paths are relative to the repository root
#   bash tests/run.sh -n 0                 one after the other; as they come, files are spread over 2 to 4 processes
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=../tools/setup_env.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../tools/setup_env.sh"
setup_environment

# The long tests wait for each other's ranks, so three processes keep two cores busy; the quick part
# is too short to pay for a third one's start.
at_least=3
arguments=()
for argument in "$@"; do
  if [[ "$argument" == -q ]]; then
    at_least=2
    arguments+=(-m "not e2e and not slow")
  else
    arguments+=("$argument")
  fi
done
workers="$(nproc)"
workers="$((workers < at_least ? at_least : workers > 4 ? 4 : workers))"

# One thread a process: the tests run several ranks at once.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
cd -- "$REPO_ROOT"
exec "$VENV_PYTHON" -m pytest -n "$workers" --dist loadfile --no-loadscope-reorder "${arguments[@]}"
