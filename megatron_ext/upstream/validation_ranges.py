"""Megatron's numbers against their ranges, and what the checks of relations see in their place."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_ext.options.megatron_ranges import FLAGS, MEGATRON_RANGES
from megatron_ext.options.ranges import flag_of, range_problems


@dataclass(frozen=True, kw_only=True)
class MegatronRanges:
    """What came of the check."""

    by_name: Mapping[str, str]
    """A sentence for each value out of range."""
    legal: Namespace
    """The arguments, with legal numbers instead of those."""

    @property
    def problems(self) -> list[str]:
        """One sentence each."""
        return list(self.by_name.values())

    def without_followers(self, sentences: Sequence[str]) -> list[str]:
        """Those that name no option that is out of range: they may only follow from it."""
        names = "|".join(re.escape(flag(name)) for name in self.by_name)
        return [s for s in sentences if not names or not re.search(rf"({names})(?![\w-])", s)]


def megatron_ranges(args: Namespace) -> MegatronRanges:
    """Check every number of Megatron's that a run reads."""
    wrong = range_problems(vars(args), MEGATRON_RANGES, flags=FLAGS)
    instead = {}
    for name in wrong:
        value, legal = getattr(args, name), MEGATRON_RANGES[name]
        is_list = isinstance(value, list)
        instead[name] = [*map(legal.nearest, value)] if is_list else legal.nearest(value)
    return MegatronRanges(by_name=wrong, legal=Namespace(**{**vars(args), **instead}))


def flag(name: str) -> str:
    """The flag of one of Megatron's values."""
    return FLAGS.get(name) or flag_of(name)
