"""Seeds made of others, so that no two streams of random numbers are alike."""

from __future__ import annotations

import hashlib


def derived_seed(*parts: int) -> int:
    """A number below 2**64 that any change of a part changes: run's seed, step, group, ..."""
    text = " ".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
