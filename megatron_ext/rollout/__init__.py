"""Rollouts in process: sampled tokens as exact ids, from the model that is being trained."""
