"""The verifiers by name, with what they keep running.

with Verifiers(config) as verify:
    verdict = verify("math", response, answer=r"\\frac{1}{2}")
"""

from __future__ import annotations

from typing import get_args

from megatron_ext.rewards.base import Verdict, Verifier, VerifierName
from megatron_ext.rewards.config import RewardConfig
from megatron_ext.rewards.math_answer import MathVerifier
from megatron_ext.rewards.plain_text import exact, numeric

VERIFIER_NAMES: tuple[VerifierName, ...] = get_args(VerifierName)


class Verifiers:
    """Every verifier; processes start with the first answer that needs them and end with this."""

    def __init__(self, config: RewardConfig) -> None:
        self._math = MathVerifier(config)
        self._by_name: dict[str, Verifier] = {
            "exact": exact,
            "numeric": numeric,
            "math": self._math,
        }

    def __call__(self, name: VerifierName, response: str, *, answer: str) -> Verdict:
        """What a response earned from the verifier of that name; see `Verifier`."""
        return self._by_name[name](response, answer=answer)

    def close(self) -> None:
        """End the processes that were started."""
        self._math.close()

    def __enter__(self) -> Verifiers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
