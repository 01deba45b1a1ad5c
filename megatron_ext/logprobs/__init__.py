"""Log-probabilities of chosen tokens, and entropy, without ever holding a microbatch's logits."""
