"""What is kept of a layer's conversion for the report, in the file of the converted layer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from megatron_ext.mla.convert import LayerReport

_SHOWN_VALUES = 256
"""Singular values kept."""


@dataclass(frozen=True, kw_only=True)
class LayerSummary:
    """What the report shows of one layer; errors as in `LayerReport`."""

    layer: int
    pairs: list[list[int]]
    """Of each rotary key: the pairs it keeps, or at whose frequencies its slots turn."""
    rotary_loss: float | None
    singular_values: list[float]
    """A sample, from the largest on."""
    tail_share: float
    key_error: float
    value_error: float
    output_error: float | None
    seconds: float

    @property
    def line(self) -> str:
        """In words."""
        output = "" if self.output_error is None else f", output {self.output_error:.3%}"
        return (
            f"layer {self.layer}: squared error of keys {self.key_error:.3%}, of values "
            f"{self.value_error:.3%}{output}; {self.seconds:.1f} s"
        )


def summary_of(layer: int, report: LayerReport, *, seconds: float) -> LayerSummary:
    """Of a report."""
    values = report.singular_values
    step = max(1, -(-len(values) // _SHOWN_VALUES))
    return LayerSummary(
        layer=layer,
        pairs=report.pairs_BK.tolist(),
        rotary_loss=report.rotary_loss,
        singular_values=values[::step].tolist(),
        tail_share=report.tail_share,
        key_error=report.key_error,
        value_error=report.value_error,
        output_error=report.output_error,
        seconds=seconds,
    )


def summary_in(path: Path) -> LayerSummary | None:
    """Of the file of a converted layer; None if it is not there.

    Raises:
        ValueError: it cannot be read.
    """
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            return LayerSummary(**json.loads((file.metadata() or {})["summary"]))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged ({error}): delete it, and it is converted again."
        ) from error
