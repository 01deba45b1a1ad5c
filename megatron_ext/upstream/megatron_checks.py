"""Megatron's own checks of its options, whose refusals become sentences with flags."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import re
import traceback
import warnings

from megatron.core.config import set_experimental_flag
from megatron.core.msc_utils import MultiStorageClientFeature
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.training import global_vars
from megatron.training.argument_utils import core_transformer_config_from_args
from megatron.training.arguments import validate_args

from megatron_ext.upstream.command_line import CommandLine

logger = logging.getLogger(__name__)

_MEGATRON_REFUSES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    SystemExit,  # of --checkpoint-activations, with status 0
)


def megatron_problems(args: argparse.Namespace, parser: CommandLine) -> list[str]:
    """Megatron's own checks and derived values, its globals set; what it refuses as a sentence.

    Its 800-line print-out goes to the debug log.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            MultiStorageClientFeature.disable()
            validate_args(args)
            core_transformer_config_from_args(args)
            _set_globals(args)
    except _MEGATRON_REFUSES as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        reason = " ".join(str(error).split()) or f"it requires {where.line}"
        known = {action.dest: action.option_strings[0] for action in parser._actions}
        named = re.sub(r"\b[a-z0-9]+(_[a-z0-9]+)+\b", lambda m: known.get(m[0], m[0]), reason)
        return [f"Megatron refuses these options: {named} ({type(error).__name__})."]
    logger.debug("%s", printed.getvalue())
    return []


def _set_globals(args: argparse.Namespace) -> None:
    """Those of Megatron's globals that its model, optimizer and checkpoints look up.

    Not its own TensorBoard and wandb writers: a run has one record, the report's.
    """
    global_vars.unset_global_variables()
    global_vars.set_args(args)
    init_num_microbatches_calculator(
        rank=args.rank,
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        data_parallel_size=args.data_parallel_size * args.gtp_weight_remat_size,
        decrease_batch_size_if_needed=False,
    )
    global_vars._set_timers(args)
    set_experimental_flag(args.enable_experimental)
