"""What a conversion does on ranks after its statistics: the second pass, the layers, the target.

The second pass (`MLAConfig.recalibrate`) runs the calibration text through the model whose rotation
is partial, on the layout of the flags.  Its sums are kept in the work folder, so that a conversion
that was interrupted goes on behind it.
Invariant the tests check: the sums are those of one rank on every layout, and those of a plain
model with pairs that stand still.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed
from tqdm import tqdm

from megatron_ext.data.hugging_face import load_tokenizer
from megatron_ext.mla.assembly import assemble
from megatron_ext.mla.checkpoint import CheckpointConversion, begin, convert_layers
from megatron_ext.mla.layer_summary import LayerSummary
from megatron_ext.mla.recalibration import partial_rotation, sums_file
from megatron_ext.mla.statistics_file import StatisticsFile, fingerprint, save_statistics
from megatron_ext.upstream.checkpoint_tensors import on_writer
from megatron_ext.upstream.evaluate import open_stepper, parse_for_evaluation
from megatron_ext.upstream.hf_weights import raise_together
from megatron_ext.upstream.layout import Layout
from megatron_ext.upstream.mla_calibrate import calibrate_inputs, read_calibration


def recalibrated(
    conversion: CheckpointConversion, words: Sequence[str], *, layout: Layout
) -> CheckpointConversion:
    """The conversion with the sums of its second pass, where it wants one.  Collective.

    words: Megatron's flags for the source, its --hf-model included.

    Raises:
        ValueError: on every rank; what was done is kept.
    """
    if not conversion.config.recalibrate:
        return conversion
    path = sums_file(conversion)
    if not path.is_file():
        rotated = partial_rotation(conversion)
        if not rotated.target.is_dir():  # it is complete or absent
            on_writer(layout, lambda: begin(rotated))
            convert_my_layers(rotated, name="partial rotation", is_told=False)
            on_writer(layout, lambda: write_target(rotated))
        _second_pass(conversion, rotated, words, layout=layout)
    return replace(conversion, recalibrated=StatisticsFile.open(path))


def _second_pass(
    conversion: CheckpointConversion,
    rotated: CheckpointConversion,
    words: Sequence[str],
    *,
    layout: Layout,
) -> None:
    config = conversion.config
    of_source = parse_for_evaluation(list(words), seq_length=config.calibration_context)
    sequences = read_calibration(of_source, config)
    tokenizer = of_source.megatron.tokenizer_model
    known = [] if tokenizer is None else ["--tokenizer-model", str(tokenizer)]
    options = parse_for_evaluation(
        [*words, "--hf-model", str(rotated.target), *known], seq_length=config.calibration_context
    )
    stepper = open_stepper(options, layout=layout)
    found = calibrate_inputs(stepper, rotated.architecture, sequences, config=config)

    def save() -> None:
        save_statistics(
            sums_file(conversion),
            found,
            context_length=config.calibration_context,
            fingerprint=fingerprint(sequences),
        )
        shutil.rmtree(rotated.target)
        shutil.rmtree(rotated.work)

    on_writer(layout, save)


def convert_my_layers(
    conversion: CheckpointConversion, *, name: str = "layers", is_told: bool = True
) -> None:
    """This rank's share of the layers.  Collective.

    name: of the progress bar.
    is_told: whether the first rank writes a line of every layer.

    Raises:
        ValueError: on every rank, if a layer of any cannot be converted.
    """
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mine = range(rank, conversion.architecture.num_layers, count)
    problems = []
    with tqdm(total=len(mine), desc=name, disable=rank != 0, leave=False) as bar:

        def done(summary: LayerSummary) -> None:
            bar.update()
            if rank == 0 and is_told:
                bar.write(summary.line)

        try:
            convert_layers(conversion, mine, done=done)
        except ValueError as error:
            problems.append(str(error))
    raise_together(problems)


def write_target(conversion: CheckpointConversion) -> None:
    """The target from the layers, all done, with its tokenizer.  By one process."""
    announced = conversion.announced()
    total = sum(info.num_bytes for info in announced.values())
    with tqdm(total=total, desc="writing", unit="B", unit_scale=True, leave=False) as bar:
        assemble(conversion, progress=bar.update)
    source = conversion.source.source.location
    if source.suffix == ".gguf":
        load_tokenizer(source).save_pretrained(str(conversion.target))
