"""Options of weights and checkpoints.

No `from __future__ import annotations`: Megatron's ArgumentGroupFactory needs the field types
themselves.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where weights come from and what is kept of a run, beside Megatron's --save and --load."""

    hf_model: str = ""
    """Where the weights come from when nothing is resumed: a Hugging Face directory (config.json
    and safetensors) or a GGUF file. Its config.json sets the architecture flags. Empty = none."""

    drop_mtp_layers: bool = False
    """Leave out the multi-token-prediction layers of --hf-model instead of refusing them.
    Off by default."""

    keep_checkpoints: int = 0
    """Newest complete checkpoints kept in --save; older ones are deleted after a newer one is
    complete. 0 = keep all."""

    def problems(self) -> list[str]:
        """What is wrong with the values, one sentence each."""
        if self.keep_checkpoints < 0:
            return [
                f"--keep-checkpoints {self.keep_checkpoints} is negative: give the number of "
                "checkpoints to keep, or 0 to keep all."
            ]
        return []
