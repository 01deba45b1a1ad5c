# The quickstart's policy and its warm start, for the examples that compare what is done with it.
# Sourced in the repository root; SEED and OUTPUT_DIR are set, and WARM_START if there is one already.

MODEL=(
  --num-layers 3 --hidden-size 96 --num-attention-heads 4 --ffn-hidden-size 384
  --position-embedding-type rope --rotary-base 1000 --normalization RMSNorm --disable-bias-linear
  --untie-embeddings-and-output-weights --init-method-std 0.1 --make-vocab-size-divisible-by 8
  --attention-dropout 0 --hidden-dropout 0 --seq-length 160 --packing --max-tokens-per-microbatch 2000
  --adam-beta2 0.95 --weight-decay 0.01 --seed "$SEED" --task-seed "$SEED"
)

# train RANKS FLAGS...
train() { "$VENV_PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$1" pretrain_rl.py "${MODEL[@]}" "${@:2}"; }

# Sets WARM_START, by supervision on demonstrations where it names no checkpoints.
warm_start() {
  if [[ -n "${WARM_START:-}" ]]; then return; fi
  WARM_START="$OUTPUT_DIR/warm_start/checkpoints"
  train 2 --train-data arithmetic-demonstrations --global-batch-size 64 --train-iters 900 \
    --lr 3e-3 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 30 \
    --output-dir "$OUTPUT_DIR/warm_start" --save "$WARM_START" --load "$WARM_START"
}
