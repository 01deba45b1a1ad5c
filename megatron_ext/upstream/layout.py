"""Which rank does what: the parallel sizes, this rank's place in them and its process groups.

Megatron keeps the layout in module globals; everything of ours takes this value instead.
Invariant the tests check: sizes multiply to the world size and every rank has its own place.
"""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import destroy_rerun_state_machine
from megatron.training import initialize
from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallel sizes and groups of a running job (tensor, pipeline, context, expert, data)."""

    groups: ProcessGroupCollection
    num_chunks: int
    """Model chunks of this rank: the virtual pipeline size, 1 without interleaving."""
    sequence_parallel: bool

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks."""
        return self.groups.tp.size()

    @property
    def pp_size(self) -> int:
        """Pipeline-parallel ranks."""
        return self.groups.pp.size()

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks: model replicas that see different samples."""
        return self.groups.dp.size()

    @property
    def dp_rank(self) -> int:
        """Which replica this rank belongs to."""
        return self.groups.dp.rank()

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the output layer (of its last chunk)."""
        return self.groups.pp.rank() == self.pp_size - 1

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes the run's files: global rank 0."""
        return torch.distributed.get_rank() == 0

    @property
    def dp_cp_group(self) -> ProcessGroup:
        """All ranks that hold a copy of this rank's weights."""
        return self.groups.dp_cp


def open_layout(args: Namespace) -> Layout:
    """Join the job: logging, ``torch.distributed``, Megatron's groups and random states.

    ``args`` are Megatron's, parsed and validated.  Collective over all ranks.  An initialised
    process group (a test's) is used as it is; a process that torchrun did not start is a job by
    itself.
    """
    if not torch.distributed.is_initialized() and "MASTER_ADDR" not in os.environ:
        _be_alone(args)
    initialize.initialize_megatron(allow_no_cuda=True, skip_mpu_initialization=True)
    initialize._initialize_distributed(None, None, None)
    initialize._set_random_seed(args.seed, args.data_parallel_random_init)
    return Layout(
        groups=ProcessGroupCollection.use_mpu_process_groups(),
        num_chunks=args.virtual_pipeline_model_parallel_size or 1,
        sequence_parallel=args.sequence_parallel,
    )


def _be_alone(args: Namespace) -> None:
    """A process group of this process, which needs neither a port nor a launcher."""
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    # documented, but torch does not declare it as exported
    store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    torch.distributed.init_process_group(
        args.distributed_backend, store=store, rank=0, world_size=1
    )


def close_layout() -> None:
    """Leave the job: destroy the groups, so that the next layout of this process starts clean."""
    parallel_state.destroy_model_parallel()
    destroy_rerun_state_machine()
    torch.distributed.destroy_process_group()
