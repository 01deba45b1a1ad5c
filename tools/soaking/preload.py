"""Imports that every run needs, once, before any of them is forked."""

from __future__ import annotations

import gc

import torch

from megatron_ext.upstream.arguments import build_parser
from pretrain_rl import quiet_libraries


def preload() -> None:
    """Make what runs share: modules and the parser; no thread may be started."""
    torch.set_num_threads(1)
    quiet_libraries()
    build_parser()
    gc.collect()
    gc.freeze()
