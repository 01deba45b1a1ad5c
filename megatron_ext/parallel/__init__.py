"""Sequence parallelism, pipeline order and pipeline communication: what Megatron 0.19 lacks."""
