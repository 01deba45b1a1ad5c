"""A first look at a command line before torch and Megatron are imported, which takes seconds.

It sees paths that cannot be used and numbers of Megatron's out of range; all else is checked by
`upstream.arguments`, which also finds these.
Invariant the tests check: what it refuses, the full check refuses as well, by the same flag.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_ext.options.job_parser import NEGATIVE_NUMBER, PROGRAM, USAGE, JobParser
from megatron_ext.options.megatron_ranges import FLAGS, FRACTIONS, INTEGERS
from megatron_ext.options.paths import file_problems, path_problems
from megatron_ext.options.ranges import flag_of, range_problems

AFTER = "The other options are checked when these can be used."


def look_first(words: Sequence[str], *, tool: str | None = None, files: Sequence[str] = ()) -> None:
    """End the process with status 2 if the words hold something that is wrong at first sight.

    tool: name of the program; None = pretrain_rl.py.  files: flags of its own that name files to
    read.
    """
    if {"-h", "--help"}.intersection(words):
        return
    if wrong := first_problems(words) + file_problems(given_values(words), files):
        parser = JobParser(prog=tool or PROGRAM, usage=f"{tool} [options]" if tool else USAGE)
        parser.refuse([*wrong, AFTER])


def first_problems(words: Sequence[str]) -> list[str]:
    """What is wrong at first sight, one sentence each."""
    values = given_values(words)
    numbers, wrong = {}, []
    for kind, ranges in ((int, INTEGERS), (float, FRACTIONS)):
        for name in ranges:
            flag = FLAGS.get(name) or flag_of(name)
            if flag not in values:
                continue
            try:
                numbers[name] = kind(values[flag])
            except ValueError:
                word = values[flag]
                wrong.append(f"{flag} {word}: invalid {kind.__name__} value: {word!r}.")
    wrong += range_problems(numbers, INTEGERS | FRACTIONS, flags=FLAGS).values()
    return wrong + path_problems(values)


def given_values(words: Sequence[str]) -> dict[str, str]:
    """The first value of each flag that has one; of a flag given twice the last counts."""
    values = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        flag, has_value, value = word.partition("=")
        if not flag.startswith("--"):
            continue
        if has_value:
            values[flag] = value
        elif not following.startswith("-") or re.match(NEGATIVE_NUMBER, following, re.IGNORECASE):
            values[flag] = following
    return values
