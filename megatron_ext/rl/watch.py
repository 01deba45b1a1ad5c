"""Warnings that a run is wrong from the start, and the end of one that cannot learn.

On policy the first update of a rollout batch sees the weights that sampled it: ratios are 1,
nothing is clipped, and the trainer's log-probs are the sampler's up to rounding.  Whatever is not
so is a defect of the set-up, and is said loudly at the first step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from megatron_ext.rl.config import AlgorithmConfig
from megatron_ext.rl.learning import Learned

logger = logging.getLogger(__name__)

RATIO_TOLERANCE = 1e-4
"""Mean |ratio - 1| between two passes of the trainer over the same rows."""
GAP_TOLERANCE = 0.01
"""Mean |log p_trainer - log p_sampler| in fp32."""
HALF_GAP_TOLERANCE = 0.1
"""The same in 16 bits."""
MOST_IDLE_STEPS = 5
"""Steps in a row without anything to train, after which a run ends."""

_CAUSES = (
    "sampler and trainer differ in temperature, precision, dropout or kernels; tokens were encoded "
    "again between turns; the sampler still has older weights; or log-probs are of other positions"
)


class NothingToTrain(ValueError):
    """Several steps in a row had nothing to train; the message counts the reasons."""


class Watch:
    """Looks at each step of one run."""

    def __init__(
        self,
        algorithm: AlgorithmConfig,
        *,
        is_half: bool,
        is_writer: bool,
        idle_steps: int = 0,
    ) -> None:
        """idle_steps: steps in a row before the first one here that had nothing to train."""
        self._algorithm = algorithm
        self._gap = HALF_GAP_TOLERANCE if is_half else GAP_TOLERANCE
        self._is_writer = is_writer
        self._is_first = True
        self.idle_steps = idle_steps
        """Steps in a row, up to the last one, without anything to train."""
        self._reasons = ""

    def __call__(self, step: int, learned: Learned) -> None:
        """Warn about a run that goes wrong."""
        if learned.updates:
            self.idle_steps = 0
            if self._is_first and self._is_writer:
                for problem in off_policy_signs(
                    learned.updates[0].statistics,
                    ratio_tolerance=self._gap
                    if self._algorithm.old_policy == "sampler"
                    else RATIO_TOLERANCE,
                    gap_tolerance=self._gap,
                ):
                    logger.warning(
                        "NOT ON POLICY at step %d: %s. Likely: %s.", step, problem, _CAUSES
                    )
            self._is_first = False
            return
        self.idle_steps += 1
        counts = learned.scored.counts
        self._reasons = (
            f"of {counts['episodes']} episodes {counts['invalid']} failed and "
            f"{counts['overlong_masked']} were cut at the length limit, and in "
            f"{counts['zero_variance_groups']} of {counts['groups']} groups all rewards are equal"
        )
        if self._is_writer:
            logger.warning("step %d trains nothing: %s.", step, self._reasons)

    def end_if_idle(self) -> None:
        """End a run that cannot learn, once its last step is recorded.

        Raises:
            NothingToTrain: nothing was left to train for several steps.
        """
        if self._reasons and self.idle_steps >= MOST_IDLE_STEPS:
            raise NothingToTrain(
                f"nothing was left to train for {self.idle_steps} steps; in the last one "
                f"{self._reasons}. Failed ones have their reasons in the log and in "
                "rollouts.jsonl. Use tasks that are neither too hard nor too easy, or a larger "
                "--group-size or --rollout-max-new-tokens."
            )


def off_policy_signs(
    first: Mapping[str, float], *, ratio_tolerance: float, gap_tolerance: float
) -> list[str]:
    """What the statistics of the first update of a rollout batch should not say."""
    found = []
    if not first["ratio_deviation"] <= ratio_tolerance:
        found.append(
            f"ratios to the old policy are 1 before the first update, but differ from it by "
            f"{first['ratio_deviation']:.3g} on average (at most {ratio_tolerance:g} is rounding)"
        )
    clipped = {name: v for name, v in first.items() if name.startswith("clip_fraction") and v > 0}
    found += [f"{name} is {value:.3g}, and must be 0" for name, value in clipped.items()]
    if not first["sampler_gap"] <= gap_tolerance:
        found.append(
            f"log-probs of sampler and trainer differ by {first['sampler_gap']:.3g} nats a token "
            f"on average (at most {gap_tolerance:g} is rounding)"
        )
    return found
