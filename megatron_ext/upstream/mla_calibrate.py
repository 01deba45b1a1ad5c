"""Calibration statistics of a model on any layout, summed where the activations are.

Sequences are dealt to data-parallel ranks and run forward only through Megatron's schedules.  Hooks
see the normalised input of every attention layer and add up what the rank's own heads make of it;
activations are not held.  `mla_collect` brings the sums to the writer.
Invariant the tests check: sums and kept inputs are those of one rank, on every layout.
Not covered: layers of Transformer Engine; of a converted model only inputs can be summed.

Legend: T tokens of a sequence, D model, S kept sequences.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from tqdm import tqdm

from megatron_ext.mla.config import MLAConfig
from megatron_ext.mla.layers import AttentionLayer
from megatron_ext.mla.rotary_pairs import rotary_pairs
from megatron_ext.mla.statistics import LayerStatistics, input_statistics, sequence_statistics
from megatron_ext.packing.batch import RowLayout, Sample, build_microbatch
from megatron_ext.packing.types import Microbatch
from megatron_ext.upstream.arguments import Options
from megatron_ext.upstream.evaluate import fewest_microbatches, read_tokens, token_values
from megatron_ext.upstream.hf_weights import raise_together
from megatron_ext.upstream.layout import Layout
from megatron_ext.upstream.mla_collect import collect
from megatron_ext.upstream.step import Stepper
from megatron_ext.weights.architecture import Architecture


def read_calibration(
    options: Options, config: MLAConfig, *, flag: str = "--calibration-data"
) -> list[Tensor]:
    """The sequences [calibration_context] of `calibration_data`, by the run's tokenizer.

    flag: that named the files, for messages.

    Raises:
        ValueError: a file cannot be read, or is too short.
    """
    texts = {path: read_tokens(options, Path(path), flag=flag) for path in config.calibration_data}
    return calibration_sequences(texts, config)


def calibration_sequences(texts: Mapping[str, Tensor], config: MLAConfig) -> list[Tensor]:
    """The beginnings of texts [n] by name, in sequences of `calibration_context` tokens.

    One of each text in turn, until there are `calibration_tokens`; a text that ends leaves its
    turns to the others.

    Raises:
        ValueError: a text, or `calibration_tokens`, is less than one sequence.
    """
    length = config.calibration_context
    wrong = []
    if config.calibration_tokens < length:
        wrong.append(
            f"--calibration-tokens {config.calibration_tokens} is less than one sequence of "
            f"--calibration-context {length}: use {length} or more tokens, or a shorter context."
        )
    wrong += [
        f"calibration text {name} has {len(tokens)} tokens, less than one sequence of "
        f"--calibration-context {length}: use a longer text, or a shorter context if the model "
        "is wanted for that."
        for name, tokens in texts.items()
        if len(tokens) < length
    ]
    if wrong:
        raise ValueError("\n  ".join(wrong))
    parts = [tokens[: len(tokens) // length * length].split(length) for tokens in texts.values()]
    turns = (sequence for turn in itertools.zip_longest(*parts) for sequence in turn)
    in_turn = [sequence for sequence in turns if sequence is not None]
    return in_turn[: config.calibration_tokens // length]


def calibrate(
    stepper: Stepper, architecture: Architecture, sequences: Sequence[Tensor], *, config: MLAConfig
) -> dict[int, LayerStatistics]:
    """Statistics of every layer, on the writer; elsewhere none.  Collective.

    stepper: of `open_stepper`.  sequences: token ids, all equally long, the same on every rank; of
        the first `calibration_kept` the inputs are kept.

    Raises:
        ValueError: on every rank, if the model's layers cannot be watched or converted, or what
            they see is not finite.
    """
    _refuse(stepper, architecture)
    if architecture.latent is not None:
        raise ValueError(
            f"{architecture.family} has latent attention already: there is nothing to convert."
        )
    share = _Share.of(stepper, sequences, architecture=architecture, config=config)
    return _watched(stepper, sequences, share=share)


def calibrate_inputs(
    stepper: Stepper, architecture: Architecture, sequences: Sequence[Tensor], *, config: MLAConfig
) -> dict[int, LayerStatistics]:
    """As `calibrate`, of the inputs alone (`input_statistics`): of a converted model too."""
    _refuse(stepper, architecture)
    config = replace(config, calibration_kept=0)
    share = _Share.of(
        stepper, sequences, architecture=architecture, config=config, is_of_inputs=True
    )
    return _watched(stepper, sequences, share=share)


def _watched(
    stepper: Stepper, sequences: Sequence[Tensor], *, share: _Share
) -> dict[int, LayerStatistics]:
    layers: Any = [y for chunk in stepper.model.bare_chunks for y in chunk.decoder.layers]
    sums: dict[int, LayerSums] = {}
    work, is_quiet = len(layers) * len(share.numbers), not share.layout.is_writer
    with (
        contextlib.ExitStack() as hooks,
        tqdm(total=work, desc="calibration", unit="layer", disable=is_quiet, leave=False) as bar,
    ):
        for layer in layers:
            hook = sums[layer.layer_number - 1] = LayerSums(share, on_input=bar.update)
            hooks.enter_context(layer.self_attention.register_forward_pre_hook(hook))
        token_values(stepper, share.microbatches(sequences))
    broken = [index for index, of_layer in sums.items() if not of_layer.is_finite]
    raise_together(
        [
            f"layer {index}: its attention sees or computes infinities or NaN on the calibration "
            "text. Run in fp32 or --bf16, or use another checkpoint."
            for index in sorted(broken)[:1]  # what comes after it is broken by it
        ]
    )
    own = {index: sums.pop(index).total_on_cpu() for index in list(sums)}
    found = collect(own, share.layout, num_layers=share.architecture.num_layers)
    return {index: _in_order(found.pop(index), share) for index in list(found)}


@dataclass(frozen=True, kw_only=True)
class _Share:
    """What one rank sees of the calibration."""

    architecture: Architecture
    config: MLAConfig
    layout: Layout
    length: int
    num_sequences: int
    numbers: list[int]
    """Sequences of this data-parallel rank, in order; those that do not exist are fillers."""
    is_of_inputs: bool = False
    """Whether only the inputs are summed."""

    @classmethod
    def of(cls, stepper: Stepper, sequences: Sequence[Tensor], **options: Any) -> _Share:
        """Every dp-th sequence, the same legal number of microbatches on every rank."""
        assert len({len(tokens) for tokens in sequences}) == 1, "sequences, all equally long"
        layout, legal = stepper.layout, fewest_microbatches(stepper)
        most = -(-len(sequences) // layout.dp_size)
        count = -(-most // legal) * legal
        return cls(
            **options,
            layout=layout,
            length=len(sequences[0]),
            num_sequences=len(sequences),
            numbers=[layout.dp_rank + layout.dp_size * i for i in range(count)],
        )

    @property
    def num_kept(self) -> int:
        """Sequences whose inputs are kept: the first, whatever the layout."""
        return min(self.config.calibration_kept, self.num_sequences)

    def microbatches(self, sequences: Sequence[Tensor]) -> list[Microbatch]:
        """One sequence each, nothing to be scored; a filler is some sequence again."""
        parts = self.layout.tp_size if self.layout.sequence_parallel else 1
        layout = RowLayout(packed=False, pad_to_multiple=parts)
        nothing = torch.zeros(self.length)
        found = []
        for number in self.numbers:
            tokens = sequences[number % self.num_sequences]
            sample = Sample(tokens=tokens, mask=nothing.bool())
            found.append(build_microbatch([sample], weights=[nothing], count=0, layout=layout))
        return found


class LayerSums:
    """A forward pre-hook of one attention layer: sums over the sequences that pass it, in order."""

    def __init__(self, share: _Share, *, on_input: Callable[[], object]) -> None:
        self.total: LayerStatistics | None = None
        self.is_finite = True
        self._share = share
        self._on_input = on_input
        self._numbers = iter(share.numbers)

    def __call__(self, attention: Any, inputs: tuple[Tensor, ...]) -> None:
        """See the input of one microbatch."""
        number = next(self._numbers)
        if number < self._share.num_sequences:
            x_TD = self._whole(inputs[0])
            with x_TD.device:  # of positions and other new tensors
                found = self._sums(attention, x_TD, number=number)
            self.is_finite &= all(bool(value.isfinite().all()) for value in vars(found).values())
            self.total = found if self.total is None else self.total + found
        self._on_input()

    def total_on_cpu(self) -> LayerStatistics | None:
        """The sums; None if no sequence passed here."""
        if self.total is None:
            return None
        return LayerStatistics(**{name: value.cpu() for name, value in vars(self.total).items()})

    def _sums(self, attention: Any, x_TD: Tensor, *, number: int) -> LayerStatistics:
        if self._share.is_of_inputs:
            return input_statistics(x_TD)
        return sequence_statistics(
            local_layer(attention, self._share.architecture),
            x_TD,
            num_queries=self._share.config.calibration_queries,
            keep=self._keeps(number),
        )

    def _whole(self, hidden: Tensor) -> Tensor:
        """The whole sequence [T, D] in float32 from this rank's part [S(/t), 1, D] of its row."""
        layout = self._share.layout
        if layout.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=layout.groups.tp)
        return hidden[: self._share.length, 0].to(torch.float32, copy=True)

    def _keeps(self, number: int) -> bool:
        """Whether the input is kept here: tensor-parallel ranks see the same."""
        return number < self._share.num_kept and self._share.layout.groups.tp.rank() == 0


def local_layer(attention: Any, architecture: Architecture) -> AttentionLayer:
    """What the statistics need of Megatron's attention: this rank's heads, in float32."""
    groups = attention.num_query_groups_per_partition
    per_group = attention.num_attention_heads_per_partition // groups
    tensors = {"o_proj.weight": attention.linear_proj.weight}
    for kind in ("weight", "bias"):
        fused = getattr(attention.linear_qkv, kind)
        if fused is None:
            continue
        grouped = fused.unflatten(0, (groups, per_group + 2, -1))
        for name, part in zip("qkv", grouped.split([per_group, 1, 1], dim=1), strict=True):
            tensors[f"{name}_proj.{kind}"] = part.flatten(0, 2)
    if architecture.qk_norm:
        tensors["q_norm.weight"] = attention.q_layernorm.weight
        tensors["k_norm.weight"] = attention.k_layernorm.weight
    mine = replace(architecture, num_heads=groups * per_group, num_groups=groups)
    return AttentionLayer.of({name: x.detach() for name, x in tensors.items()}, mine)


def _refuse(stepper: Stepper, architecture: Architecture) -> None:
    """What would fail on some rank in the middle of a schedule, where the others wait."""
    wrong = []
    implementation = stepper.model.config.transformer_impl
    if implementation != "local":
        wrong.append(
            f"--transformer-impl {implementation} normalises inside its projections, where the "
            "inputs of attention cannot be seen. Calibrate with --transformer-impl local."
        )
    if architecture.num_groups % stepper.layout.tp_size:
        wrong.append(
            f"--tensor-model-parallel-size {stepper.layout.tp_size} does not divide the "
            f"{architecture.num_groups} KV heads, whose statistics are made on the ranks. Use a "
            "size that does."
        )
    if wrong:
        raise ValueError("\n  ".join(wrong))
    rotary_pairs(architecture.rope, head_size=architecture.head_size)


def _in_order(statistics: LayerStatistics, share: _Share) -> LayerStatistics:
    """With the kept inputs as the sequences were, not one data-parallel rank after the other."""
    dp_size = share.layout.dp_size
    arrived = sorted(range(share.num_kept), key=lambda number: (number % dp_size, number))
    order_S = torch.tensor(arrived, dtype=torch.int64).argsort()
    return replace(statistics, inputs_STD=statistics.inputs_STD[order_S])
