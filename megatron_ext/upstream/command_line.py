"""An argument parser whose help and errors help: all misspellings in one message, said once.

argparse stops at the first bad value, breaks on a ``%`` in a help text (one of Megatron's has one),
lets errors of its converters through as tracebacks and prints on every rank.  This one does not.
Invariant the tests check: whatever the words, reading them returns or raises `BadOptions`.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron_ext.options.job_parser import JobParser
from megatron_ext.options.ranges import BadOptions, Range

_CONVERTER_ERRORS = (ArithmeticError, AssertionError, LookupError, OSError, SyntaxError)
"""What Megatron's converters raise for bad words, beside the errors that argparse expects."""


@dataclass(frozen=True, kw_only=True)
class GivenFlag:
    """An option that the command line names."""

    flag: str
    """As it was written."""
    name: str
    """Of the parsed value."""
    group: str
    """Title of its group in the help."""


class HelpFormatter(argparse.HelpFormatter):
    """Shows defaults, says what flags turn off, and takes a lone ``%`` as a percent sign."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = re.sub(r"%(?!\(\w+\)[sdr])", "%%", (action.help or "").replace("%%", "%"))
        turns_off = isinstance(action, argparse._StoreFalseAction)
        if turns_off and not re.match(r"(do not|don't|no|disable|turn|if set)\b", text, re.I):
            text = f"Turn off: {text}"  # the text of a field that is on by default
        takes_value = action.nargs != 0 and action.default not in (None, argparse.SUPPRESS)
        says_default = "default" in text.lower()
        return f"{text} (default: %(default)s)" if takes_value and not says_default else text


class CommandLine(JobParser):
    """``read`` words; ``refuse`` them with every reason."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, allow_abbrev=False, formatter_class=HelpFormatter)
        self._bad_values: list[str] = []

    def error(self, message: str) -> NoReturn:
        """Raise `BadOptions`: who reads the words says how they are refused."""
        raise BadOptions([f"{message}."])

    def read(self, words: Sequence[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
        """The values; a sentence for each bad value (its default is used) and each unknown flag.

        Raises:
            BadOptions: a flag lacks its value.
        """
        self._bad_values = []
        values, unknown = self.parse_known_args(words)
        return values, self._bad_values, self._unknown(unknown)

    def given(self, words: Sequence[str]) -> list[GivenFlag]:
        """The options that the words name; an option named twice is there twice."""
        groups = {
            option: (action.dest, str(group.title))
            for group in self._action_groups
            for action in group._group_actions
            for option in action.option_strings
        }
        flags = [word.split("=")[0] for word in words]
        return [
            GivenFlag(flag=flag, name=groups[flag][0], group=groups[flag][1])
            for flag in flags
            if flag in groups
        ]

    def show_ranges(self, ranges: Mapping[str, Range]) -> None:
        """Add the legal values, by the names of the parsed values, to the help texts."""
        for action in self._actions:
            if action.dest in ranges:
                text = (action.help or "").rstrip().rstrip(".")
                action.help = f"{text}. Legal: {ranges[action.dest].interval}."

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Convert an option's words; a bad one is noted and reading goes on."""
        try:
            return super()._get_values(action, arg_strings)  # type: ignore[misc]
        except argparse.ArgumentError as error:
            reason = f"{error.message}."
        except _CONVERTER_ERRORS as error:
            choices = [getattr(choice, "name", str(choice)) for choice in action.choices or ()]
            hint = f"choose from {', '.join(choices)}" if choices else str(error)
            reason = f"this value cannot be used: {hint}."
        shown = " ".join([*action.option_strings[:1], *arg_strings])
        self._bad_values.append(f"{shown}: {reason}")
        return action.default

    def _unknown(self, words: Sequence[str]) -> list[str]:
        """A sentence for each unknown flag with the nearest that exist; values after it are its."""
        known = list(self._option_string_actions)
        flags = [word.split("=")[0] for word in words if word.startswith("-")]
        strays = [] if flags else list(words)
        sentences = [f"{word}: a value without a flag." for word in strays]
        for flag in flags:
            near = difflib.get_close_matches(flag.replace("_", "-"), known, n=3, cutoff=0.6)
            hint = f"did you mean {' or '.join(near)}?" if near else "--help lists all options."
            sentences.append(f"{flag}: there is no such option; {hint}")
        return sentences
