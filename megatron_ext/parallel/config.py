"""Options of the parallel room.

No `from __future__ import annotations`: Megatron's ArgumentGroupFactory needs the field types
themselves.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Pipeline and tensor parallelism beyond Megatron's own options."""

    scatter_gather_pipeline_tensors: bool = False
    """Send 1/t of each pipeline boundary tensor per tensor-parallel rank and all-gather it inside
    the receiving stage (Narayanan et al. 2021, section 4.1). Off by default; needs
    --tensor-model-parallel-size > 1 and --pipeline-model-parallel-size > 1 without
    --sequence-parallel (which sends 1/t already)."""
