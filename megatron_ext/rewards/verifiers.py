"""The verifiers by name, with what they keep running.

with Verifiers(config) as verify:
    verdict = verify("math", response, answer=r"\\frac{1}{2}")
"""

from __future__ import annotations

from typing import get_args

from megatron_ext.rewards import math_answer
from megatron_ext.rewards.base import Verdict, Verifier, VerifierName
from megatron_ext.rewards.config import RewardConfig
from megatron_ext.rewards.plain_text import NOT_ONE_NUMBER, exact, numeric, read_number

VERIFIER_NAMES: tuple[VerifierName, ...] = get_args(VerifierName)


def known_answer_problem(verifier: VerifierName, answer: str) -> str | None:
    """Why a verifier cannot take a text as the known answer of a task; None = it can."""
    if not answer.strip():
        return "is empty"
    if verifier == "numeric" and read_number(answer) is None:
        return f"{answer[:40]!r} {NOT_ONE_NUMBER}"
    problem = math_answer.known_answer_problem(answer) if verifier == "math" else None
    return problem and f"{answer[:40]!r} {problem}"


class Verifiers:
    """Every verifier; processes start with the first answer that needs them and end with this."""

    def __init__(self, config: RewardConfig) -> None:
        self._math = math_answer.MathVerifier(config)
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
