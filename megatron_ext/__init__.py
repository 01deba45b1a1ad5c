"""Megatron-Core extension for reinforcement-learning post-training with cheap rollouts."""

__version__ = "0.1.0"
