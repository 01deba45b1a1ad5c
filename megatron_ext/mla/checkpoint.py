"""A whole checkpoint, layer by layer: attention converted, everything else as it was.

Every converted layer becomes a file in a work folder beside the target, so a conversion that was
interrupted goes on where it stopped, and several processes can share the layers.  The target is
written from them at the end; it is complete or absent.  One layer is held at a time.
Invariant the tests check: killed after any layer and started again, the result is the same bit for
bit; layers of another conversion are never taken.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_ext.mla.budget import best_division
from megatron_ext.mla.config import FOUND, MLAConfig
from megatron_ext.mla.convert import convert_layer
from megatron_ext.mla.decoder import DenseDecoder
from megatron_ext.mla.layer_summary import LayerSummary, summary_in, summary_of
from megatron_ext.mla.layers import LatentLayer
from megatron_ext.mla.problems import conversion_problems, text_problems
from megatron_ext.mla.read import attention_prefix, read_layer
from megatron_ext.mla.sequential import convert_sequentially
from megatron_ext.mla.sizes import latent_rank
from megatron_ext.mla.statistics import LayerStatistics
from megatron_ext.mla.statistics_file import StatisticsFile
from megatron_ext.mla.tensors import converted_of, layer_tensors
from megatron_ext.report.whole_file import whole_file
from megatron_ext.weights.architecture import Architecture
from megatron_ext.weights.checks import Checkpoint
from megatron_ext.weights.sources import TensorInfo
from megatron_ext.weights.stream import announced_tensors

WORK_SUFFIX = ".layers"
_IDENTITY, _DIVISION = "identity.json", "division.json"
_DIVIDED_LAYERS = 3
"""Layers, evenly spaced, on which --rope-pairs are found."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConversion:
    """What is converted to what, and how; nothing is written before `convert_layers`."""

    source: Checkpoint
    target: Path
    config: MLAConfig
    statistics: StatisticsFile | None
    dtype: torch.dtype | None = None
    """Of the weights; None = as they are."""
    recalibrated: StatisticsFile | None = None
    """Inputs of the layers behind partial rotation (`recalibration`)."""

    @classmethod
    def of(
        cls,
        source: Checkpoint,
        target: Path,
        *,
        config: MLAConfig,
        statistics: StatisticsFile | None,
        dtype: torch.dtype | None = None,
    ) -> CheckpointConversion:
        """Checked.

        Raises:
            ValueError: the options do not fit the checkpoint, or the target exists; all reasons.
        """
        wrong = conversion_problems(config, source.architecture) + text_problems(config)
        layers = source.architecture.num_layers
        is_fitted_in_order = config.sequential_compensation
        if config.needs_statistics and statistics is None and not is_fitted_in_order:
            wrong.append(
                "the conversion looks at activations: give --calibration-data, "
                "--calibration-statistics, or --low-rank-method paper-joint with a --rope-strategy "
                "high, low or uniform, which need none."
            )
        if statistics is not None and statistics.num_layers != layers:
            wrong.append(
                f"--calibration-statistics {statistics.path} has {statistics.num_layers} layers, "
                f"the checkpoint {layers}: calibrate this checkpoint."
            )
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            wrong.append(f"{target} exists and is not empty. Give another folder, or delete it.")
        if wrong:
            raise ValueError("\n  ".join(wrong))
        return cls(source=source, target=target, config=config, statistics=statistics, dtype=dtype)

    @property
    def architecture(self) -> Architecture:
        """Of the target; rotary pairs are known."""
        original = self.source.architecture
        return replace(original, converted=converted_of(self.config, original))

    def announced(self) -> dict[str, TensorInfo]:
        """The target's tensors, in the order they are written."""
        tensors = self.source.source.tensors
        kind = self.dtype or tensors[f"{attention_prefix(0)}q_proj.weight"].dtype
        assert isinstance(kind, torch.dtype), "checked when opened"
        return announced_tensors(
            self.architecture, dtype=kind, like=None if self.dtype else tensors
        )

    @property
    def work(self) -> Path:
        """Where converted layers wait."""
        return self.work_of(self.target)

    @staticmethod
    def work_of(target: Path) -> Path:
        """The work folder of a target."""
        return target.with_name(target.name + WORK_SUFFIX)

    def layer_file(self, layer: int) -> Path:
        """One converted layer."""
        return self.work / f"layer_{layer:04d}.safetensors"

    def statistics_of(self, layer: int) -> LayerStatistics | None:
        """One layer's calibration."""
        return None if self.statistics is None else self.statistics.layer(layer)

    def recalibrated_of(self, layer: int) -> LayerStatistics | None:
        """The inputs of one layer behind partial rotation."""
        return None if self.recalibrated is None else self.recalibrated.layer(layer)

    @property
    def _text(self) -> list[Any] | None:
        """What the second pass reads; None without one."""
        config = self.config
        if not config.recalibrate:
            return None
        texts = [_digest(Path(path)) for path in config.calibration_data]
        return [*texts, config.calibration_tokens, config.calibration_context]

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the values of converted layers."""
        tensors = {n: [*i.shape, str(i.dtype)] for n, i in self.source.source.tensors.items()}
        used = None if self.statistics is None else _digest(self.statistics.path)
        return {
            "source": str(self.source.source.location.resolve()),
            "tensors": hashlib.sha256(json.dumps(tensors, sort_keys=True).encode()).hexdigest(),
            "options": {n: v for n, v in asdict(self.config).items() if "calibration" not in n},
            "statistics": used,
            "text": self._text,
            "dtype": str(self.dtype),
        }


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def begin(conversion: CheckpointConversion) -> CheckpointConversion:
    """The conversion with rotary pairs and stride known; its work folder is there.

    By one process, before any converts layers.

    Raises:
        ValueError: the work folder is that of another conversion.
    """
    work, identity = conversion.work, conversion.identity
    known = work / _IDENTITY
    if not known.is_file():
        work.mkdir(parents=True, exist_ok=True)
        with whole_file(known) as partial:
            partial.write_text(json.dumps(identity, indent=2), encoding="utf-8")
    elif json.loads(known.read_text(encoding="utf-8")) != identity:
        raise ValueError(
            f"{work} has layers of another conversion (other options, weights or statistics). "
            "Delete it to start over, or give another output folder."
        )
    return divided(conversion)


def divided(conversion: CheckpointConversion) -> CheckpointConversion:
    """With the best --rope-pairs and --rope-stride where they were left to be found."""
    config = conversion.config
    is_shared = config.mla_layout == "deepseek"
    if config.rope_pairs != FOUND and not (is_shared and config.rope_stride == FOUND):
        return conversion
    found = conversion.work / _DIVISION
    if not found.is_file():
        architecture = conversion.source.architecture
        count = min(_DIVIDED_LAYERS, architecture.num_layers)
        numbers = [(2 * i + 1) * architecture.num_layers // (2 * count) for i in range(count)]
        layers = (
            (read_layer(conversion.source, number), statistics)
            for number in numbers
            if (statistics := conversion.statistics_of(number)) is not None
        )
        best, _ = best_division(layers, config=config, architecture=architecture)
        with whole_file(found) as partial:
            values = {"rope_pairs": best.rope_pairs, "rope_stride": best.rope_stride}
            partial.write_text(json.dumps(values), encoding="utf-8")
    values = json.loads(found.read_text(encoding="utf-8"))
    return replace(conversion, config=replace(config, **values))


def convert_layers(
    conversion: CheckpointConversion,
    layers: Iterable[int],
    *,
    done: Callable[[LayerSummary], object],
) -> None:
    """Convert layers whose file is not there yet.

    done: told of every layer, also of those that were there.
    """
    for layer in layers:
        path = conversion.layer_file(layer)
        summary = summary_in(path)
        if summary is None:
            summary = _convert(conversion, layer)
        done(summary)


def convert_layers_in_order(
    conversion: CheckpointConversion,
    sequences: Sequence[Tensor],
    *,
    done: Callable[[LayerSummary], object],
) -> None:
    """Convert all layers by `sequential`, each fitted to what those before it leave.

    In one process; what an interrupted conversion has done is done again.

    sequences: token ids to calibrate and fit on, all equally long.
    """
    config, source = conversion.config, conversion.source
    decoder = DenseDecoder(source)
    numbers = range(source.architecture.num_layers)
    results = convert_sequentially(
        (read_layer(source, number) for number in numbers),
        decoder.embedded(torch.stack(list(sequences))),
        inputs=decoder.inputs,
        advance=decoder.advance,
        config=config,
        rank=latent_rank(config, source.architecture),
    )
    started = time.perf_counter()
    for layer, (converted, report) in enumerate(results):
        summary = summary_of(layer, report, seconds=time.perf_counter() - started)
        _save(conversion, converted, summary)
        done(summary)
        started = time.perf_counter()


def _convert(conversion: CheckpointConversion, layer: int) -> LayerSummary:
    started = time.perf_counter()
    config, source = conversion.config, conversion.source
    converted, report = convert_layer(
        read_layer(source, layer),
        config=config,
        rank=latent_rank(config, source.architecture),
        statistics=conversion.statistics_of(layer),
        recalibrated=conversion.recalibrated_of(layer),
    )
    summary = summary_of(layer, report, seconds=time.perf_counter() - started)
    _save(conversion, converted, summary)
    return summary


def _save(conversion: CheckpointConversion, layer: LatentLayer, summary: LayerSummary) -> None:
    announced, prefix = conversion.announced(), attention_prefix(summary.layer)
    tensors = {}
    for name, values in layer_tensors(layer).items():
        kind = announced[prefix + name].dtype
        assert isinstance(kind, torch.dtype), f"{name}: checked when opened"
        tensors[prefix + name] = values.to(kind)
    with whole_file(conversion.layer_file(summary.layer)) as partial:
        save_file(tensors, partial, metadata={"summary": json.dumps(asdict(summary))})


def all_summaries(conversion: CheckpointConversion) -> list[LayerSummary]:
    """Of every layer; all are done."""
    found = [
        summary_in(conversion.layer_file(layer))
        for layer in range(conversion.architecture.num_layers)
    ]
    return [summary for summary in found if summary is not None]
