"""MHA2MLA: attention layers become latent attention; from weights and statistics to weights."""
