"""The parser of a program that a job's ranks run together: one of them speaks.

It imports nothing heavy.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

PROGRAM = "pretrain_rl.py"
USAGE = f"torchrun --nproc-per-node RANKS {PROGRAM} [options]"
NEGATIVE_NUMBER = r"^-(\d[\d_]*\.?\d*|\.\d+)(e[+-]?\d+)?$|^-(inf|infinity|nan)$"
"""Words that are values, not flags: argparse's own pattern knows no exponents."""
_TURN_SECONDS = 30.0
"""How long other ranks let rank 0 speak; torchrun ends them as soon as rank 0 has."""


class JobParser(argparse.ArgumentParser):
    """A parser that every rank of a job has: help and errors are printed once."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._negative_number_matcher = re.compile(NEGATIVE_NUMBER, re.IGNORECASE)

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

    def refuse(self, problems: Sequence[str]) -> NoReturn:
        """End the process with status 2 and a message that lists the problems."""
        JobParser.error(self, "".join(f"\n  {problem}" for problem in problems))
