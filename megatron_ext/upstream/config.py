"""Options of models, weights and checkpoints.

No `from __future__ import annotations`: Megatron's ArgumentGroupFactory needs the field types
themselves.
"""

from dataclasses import dataclass
from typing import Literal

from megatron_ext.options.ranges import Ranged, ranged


@dataclass(frozen=True, kw_only=True)
class LatentConfig(Ranged):
    """Attention that tools/convert_checkpoint.py --to mla has converted; --hf-model sets it."""

    latent_layout: Literal["none", "paper", "deepseek"] = "none"
    """Rotary keys of converted attention: paper = each KV head has its own, deepseek = one for all.
    none = the attention is not converted."""

    latent_pairs: int = ranged(0, at_least=0)
    """Rotary pairs (two numbers each) of each rotary key of converted attention."""

    latent_rank: int = ranged(0, at_least=0)
    """Numbers of the latent of keys and values of converted attention."""

    latent_query_rank: int = ranged(0, at_least=0)
    """Numbers of its latent of queries; 0 = none."""

    def problems(self, *, head_size: int, num_groups: int, tp_size: int) -> list[str]:
        """What is wrong with the values, one sentence each.

        head_size, num_groups: of the original attention.
        """
        numbers = {
            "--latent-pairs": self.latent_pairs,
            "--latent-rank": self.latent_rank,
            "--latent-query-rank": self.latent_query_rank,
        }
        if self.latent_layout == "none":
            return [
                f"{flag} {number} without --latent-layout: it is of converted attention. Add the "
                "layout, or take the flag out."
                for flag, number in numbers.items()
                if number
            ]
        wrong = []
        if self.latent_rank == 0:
            wrong.append("--latent-rank 0: converted attention has a latent. Give its size.")
        if 2 * self.latent_pairs > head_size:
            wrong.append(
                f"--latent-pairs {self.latent_pairs}: a head of {head_size} has "
                f"{head_size // 2} pairs at most. Give so many or less."
            )
        if num_groups % tp_size:
            wrong.append(
                f"--tensor-model-parallel-size {tp_size} does not divide the {num_groups} KV "
                "heads, whose keys and values are made on the ranks. Use a size that does."
            )
        return wrong


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Ranged):
    """Where weights come from and what is kept of a run, beside Megatron's --save and --load."""

    hf_model: str = ""
    """Where the weights come from when nothing is resumed: a Hugging Face directory (config.json
    and safetensors) or a GGUF file. Its config.json sets the architecture flags. Empty = none."""

    drop_mtp_layers: bool = False
    """Leave out the multi-token-prediction layers of --hf-model instead of refusing them.
    Off by default."""

    keep_checkpoints: int = ranged(0, at_least=0, note="0 keeps all")
    """Newest complete checkpoints kept in --save; older ones are deleted after a newer one is
    complete. 0 = keep all."""

    verify_checksums: bool = True
    """Compare every file of a checkpoint with its checksum (checksums.json beside it) before it is
    loaded. Off: only files that are missing or cut short are found."""

    save_interval_minutes: float | None = ranged(None, at_least=0, note="0 turns it off")
    """Minutes after which a checkpoint is saved that --save-interval did not ask for, so that a
    killed run loses no more; the two newest of these are kept. 0 = off. Unset = 10 with --save and
    without --save-interval, else off."""
