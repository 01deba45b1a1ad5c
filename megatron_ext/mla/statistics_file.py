"""Calibration statistics as one safetensors file: written whole, read layer by layer.

The file knows the context length of its sequences and a fingerprint of its text, so that a user
can be told when a longer context is wanted than was calibrated, or when a model is judged on the
text it was calibrated on.
Invariant the tests check: sums come back as saved, the two D x D moments to float32.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_ext.mla.statistics import LayerStatistics

_FORMAT = "megatron-ext mla statistics 1"
_WINDOW = 32
"""Tokens of a passage that is recognised again."""
_KEPT = 16
"""One of so many passages is remembered."""
_PRIME = (1 << 31) - 1
_FINGERPRINT = "fingerprint"
_HALVED = ("moment_DD", "received_moment_DD")
"""Large sums, written in float32."""


@dataclass(frozen=True, kw_only=True)
class StatisticsFile:
    """An opened file."""

    path: Path
    context_length: int
    """Tokens of its sequences."""
    num_layers: int

    @classmethod
    def open(cls, path: Path) -> StatisticsFile:
        """Open a file of `save_statistics`.

        Raises:
            ValueError: it is none.
        """
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"{path} cannot be read as calibration statistics ({error}). Calibrate again."
            ) from error
        if metadata.get("format") != _FORMAT:
            raise ValueError(
                f"{path} has the format {metadata.get('format')!r}, not {_FORMAT!r}. Name a file "
                "of statistics, or calibrate again."
            )
        numbers = json.loads(metadata["numbers"])
        return cls(path=path, **numbers)

    def layer(self, index: int) -> LayerStatistics:
        """One layer's sums."""
        with safe_open(self.path, framework="pt") as file:
            values = {
                f.name: file.get_tensor(f"layers.{index}.{f.name}") for f in fields(LayerStatistics)
            }
        return LayerStatistics(**(values | {name: values[name].double() for name in _HALVED}))

    def fingerprint(self) -> Tensor:
        """Of the text: see `fingerprint`."""
        with safe_open(self.path, framework="pt") as file:
            return file.get_tensor(_FINGERPRINT)

    def warnings(self, *, context_length: int, text: Iterable[Tensor] = ()) -> list[str]:
        """What speaks against judging a conversion at a context length or on token sequences."""
        found = []
        if context_length > self.context_length:
            found.append(
                f"{self.path.name} was calibrated at {self.context_length} tokens, and contexts of "
                f"{context_length} are wanted: pairs that hardly turn within the first may turn "
                f"many times within the second. Calibrate at {context_length}."
            )
        share = overlap(self.fingerprint(), fingerprint(text))
        if share > 0:
            found.append(
                f"{share:.0%} of the evaluated text is text of the calibration in "
                f"{self.path.name}: the result flatters the conversion. Evaluate on other text."
            )
        return found


def save_statistics(
    path: Path,
    layers: Mapping[int, LayerStatistics],
    *,
    context_length: int,
    fingerprint: Tensor,
) -> None:
    """Write the sums of layers 0 to L - 1; the file is complete or as it was before."""
    assert list(layers) == list(range(len(layers))), "one entry a layer, in order"
    tensors = {_FINGERPRINT: fingerprint}
    for index, statistics in layers.items():
        for field in fields(statistics):
            value = getattr(statistics, field.name)
            value = value.float() if field.name in _HALVED else value
            tensors[f"layers.{index}.{field.name}"] = value.contiguous()
    numbers = {"context_length": context_length, "num_layers": len(layers)}
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        save_file(tensors, partial, metadata={"format": _FORMAT, "numbers": json.dumps(numbers)})
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def fingerprint(sequences: Iterable[Tensor]) -> Tensor:
    """Hashes (int64, ascending, distinct) of a sample of the passages of token sequences.

    A passage is in the sample by its content alone, so the same passage of two texts is in both
    samples or in none, wherever their sequences are cut.  Parts are joined by `torch.unique`.
    """
    hashes = [torch.zeros(0, dtype=torch.int64)]
    for tokens_T in sequences:
        if len(tokens_T) >= _WINDOW:
            found = _window_hashes(tokens_T.long())
            hashes.append(found[found % _KEPT == 0])
    return torch.cat(hashes).unique()


def _window_hashes(tokens_T: Tensor) -> Tensor:
    """A polynomial hash of every `_WINDOW` neighbouring tokens, Horner's rule in a prime field."""
    windows = tokens_T.unfold(0, _WINDOW, 1)
    found = torch.zeros(len(windows), dtype=torch.int64)
    for place in range(_WINDOW):
        found = (found * 1_000_003 + windows[:, place] + 1) % _PRIME
    return found


def overlap(known: Tensor, other: Tensor) -> float:
    """Share of the passages sampled of `other` that are in `known`; 0 if there are none."""
    return float(torch.isin(other, known).double().mean()) if len(other) else 0.0
