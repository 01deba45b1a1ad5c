"""Checkpoints of other formats: reading, the mapping to Megatron's tensors and back, writing."""
