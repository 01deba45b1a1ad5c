"""An argument parser whose help and errors help: all misspellings in one message, said once.

argparse stops at the first bad value, breaks on a ``%`` in a help text (one of Megatron's has one),
lets errors of its converters through as tracebacks and prints on every rank.  This one does not.
Invariant the tests check: whatever the words, reading them returns or ends in status 2.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

_TURN_SECONDS = 30.0
"""How long other ranks let rank 0 speak; torchrun ends them as soon as rank 0 has."""
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


class JobParser(argparse.ArgumentParser):
    """A parser that every rank of a job has: help and errors are printed once."""

    def error(self, message: str) -> NoReturn:
        """Print usage and message, and exit with status 2; only rank 0 prints.

        A rank that torchrun has not ended when its turn has come is the only one with a problem
        (a file that its node lacks), and prints as well.
        """
        rank = int(os.environ.get("RANK", "0"))
        if rank != 0:
            if "TORCHELASTIC_RUN_ID" not in os.environ:
                self.exit(2)
            time.sleep(_TURN_SECONDS)
            message = f"on rank {rank}: {message}"
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: error: {message}\n")

    def fail(self, message: str) -> NoReturn:
        """End a run that cannot go on, with status 1 and one message, which only rank 0 prints."""
        if int(os.environ.get("RANK", "0")) != 0:
            if "TORCHELASTIC_RUN_ID" in os.environ:
                time.sleep(_TURN_SECONDS)
            self.exit(1)
        self.exit(1, f"{self.prog}: error: {message}\n")

    def print_help(self, file: Any = None) -> None:
        """Print the help, once in a job."""
        if int(os.environ.get("RANK", "0")) == 0:
            super().print_help(file)


class CommandLine(JobParser):
    """``read`` words; ``refuse`` them with every reason."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, allow_abbrev=False, formatter_class=HelpFormatter)
        self._bad_values: list[str] = []

    def read(self, words: Sequence[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
        """The values; a sentence for each bad value (its default is used) and each unknown flag."""
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

    def refuse(self, problems: Sequence[str]) -> NoReturn:
        """End the process with status 2 and a message that lists the problems."""
        self.error("".join(f"\n  {problem}" for problem in problems))

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
