"""Training samples: reading, tokenising and ordering them, the same on every layout."""
