"""Every number of a command line against its range, and what other checks see in its place.

The checks of what fits together divide by sizes and compare rates: they get legal numbers instead
of those out of range, and what they say of these is left out, because it may only follow.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_ext.options.megatron_ranges import FLAGS
from megatron_ext.options.ranges import Range, flag_of, range_problems


@dataclass(frozen=True, kw_only=True)
class RangeCheck:
    """What came of it."""

    by_name: Mapping[str, str]
    """A sentence for each value out of range."""
    legal: Namespace
    """The arguments, with legal numbers instead of those."""

    @property
    def problems(self) -> list[str]:
        """One sentence each."""
        return list(self.by_name.values())

    def without_followers(self, sentences: Sequence[str]) -> list[str]:
        """Those that name no option that is out of range."""
        flags = "|".join(re.escape(FLAGS.get(name) or flag_of(name)) for name in self.by_name)
        return [s for s in sentences if not flags or not re.search(rf"({flags})(?![\w-])", s)]


def check_ranges(args: Namespace, ranges: Mapping[str, Range]) -> RangeCheck:
    """Check every number that has a range."""
    wrong = range_problems(vars(args), ranges, flags=FLAGS)
    instead = {}
    for name in wrong:
        value, legal = getattr(args, name), ranges[name]
        is_list = isinstance(value, list)
        instead[name] = [*map(legal.nearest, value)] if is_list else legal.nearest(value)
    return RangeCheck(by_name=wrong, legal=Namespace(**{**vars(args), **instead}))
