"""Checkpoints to latent attention on the ranks of a job: calibrate, convert, judge, report.

Calibration and evaluation run the model on the layout of the flags.  The conversion itself needs no
model: every rank converts some layers from the checkpoint's files, and the first writes the target.
Invariant the tests check: the result is the same on every layout and number of ranks, up to the
rounding of calibration.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor
from tqdm import tqdm

from megatron_ext.evaluation.perplexity import (
    Mean,
    TokenScores,
    mean_nll,
    paired_difference,
    sliding_windows,
)
from megatron_ext.mla.checkpoint import (
    CheckpointConversion,
    all_summaries,
    begin,
    convert_layers_in_order,
)
from megatron_ext.mla.layer_summary import LayerSummary
from megatron_ext.mla.problems import conversion_notices, conversion_problems, text_problems
from megatron_ext.mla.report import Judgement, write_report
from megatron_ext.mla.statistics_file import StatisticsFile, fingerprint, save_statistics
from megatron_ext.upstream.checkpoint_tensors import on_writer
from megatron_ext.upstream.evaluate import (
    open_stepper,
    parse_for_evaluation,
    read_tokens,
    score_windows,
)
from megatron_ext.upstream.layout import Layout, open_layout
from megatron_ext.upstream.mla_calibrate import calibrate, read_calibration
from megatron_ext.upstream.mla_job import MlaJob, hf_source, model_lengths, too_long
from megatron_ext.upstream.mla_recalibrate import (
    convert_my_layers,
    recalibrated,
    write_target,
)
from megatron_ext.weights.checks import Checkpoint, open_checkpoint

_STATISTICS = "statistics.safetensors"


def convert_to_mla(job: MlaJob) -> list[LayerSummary]:
    """Convert a checkpoint; its layers on every rank.  Collective.

    Raises:
        ValueError: on every rank; the work folder keeps what was done, for the next call.
    """
    path = hf_source(job)
    source, words = open_checkpoint(path), [*job.words, "--hf-model", str(path)]
    lengths = model_lengths(job)
    wrong = too_long(lengths, source.architecture.max_positions)
    wrong += conversion_problems(job.config, source.architecture) + text_problems(job.config)
    if wrong:
        raise ValueError("\n  ".join(wrong))
    options = parse_for_evaluation(words, seq_length=max([2, *lengths.values()]))
    layout = open_layout(options.megatron)
    tp_size = options.megatron.tensor_model_parallel_size
    if wrong := conversion_problems(job.config, source.architecture, tp_size=tp_size):
        raise ValueError("\n  ".join(wrong))
    scores = []
    if job.evaluation_text is not None:
        scores.append(_scores(job, job.evaluation_text, words, layout=layout))
    statistics = _statistics(job, words, source=source, layout=layout)
    conversion = CheckpointConversion.of(
        source, job.target, config=job.config, statistics=statistics, dtype=job.dtype
    )
    conversion = _begun(conversion, layout)
    if layout.is_writer:
        for notice in conversion_notices(conversion.config, source.architecture, tp_size=tp_size):
            job.say(f"note: {notice}")
    if job.config.sequential_compensation:
        on_writer(layout, lambda: _convert_in_order(job, conversion, words))
    else:
        conversion = recalibrated(conversion, words, layout=layout)
        convert_my_layers(conversion)
    on_writer(layout, lambda: _write(conversion))
    if job.evaluation_text is not None:
        converted = [*job.words, "--hf-model", str(job.target)]
        scores.append(_scores(job, job.evaluation_text, converted, layout=layout))
    summaries = all_summaries(conversion)
    on_writer(layout, lambda: _finish(job, conversion, summaries, scores=scores))
    return summaries


def _statistics(
    job: MlaJob, words: Sequence[str], *, source: Checkpoint, layout: Layout
) -> StatisticsFile | None:
    """The file that is there, or one made from --calibration-data; None = neither, or not needed.

    Collective.
    """
    config = job.config
    if not config.needs_statistics or config.sequential_compensation:
        return None
    path = Path(config.calibration_statistics or job.work / _STATISTICS)
    if not path.is_file():
        if not config.calibration_data:
            return None  # `CheckpointConversion.of` says what is missing
        options = parse_for_evaluation(words, seq_length=config.calibration_context)
        sequences = read_calibration(options, config)
        if layout.is_writer:
            size = config.calibration_context
            job.say(f"calibration: {len(sequences)} sequences of {size} tokens")
        stepper = open_stepper(options, layout=layout)
        found = calibrate(stepper, source.architecture, sequences, config=config)

        def save() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_statistics(
                path,
                found,
                context_length=config.calibration_context,
                fingerprint=fingerprint(sequences),
            )

        on_writer(layout, save)
    statistics = StatisticsFile.open(path)
    if layout.is_writer:
        for warning in statistics.warnings(
            context_length=job.evaluation_window if job.evaluation_text else 0,
            text=_evaluated(job, words),
        ):
            job.say(f"warning: {warning}")
    return statistics


def _evaluated(job: MlaJob, words: Sequence[str]) -> list[Tensor]:
    """The tokens that the conversion is judged on."""
    if job.evaluation_text is None:
        return []
    options = parse_for_evaluation(words, seq_length=job.evaluation_window)
    tokens = read_tokens(options, job.evaluation_text, flag="--evaluation-text")
    limit = len(tokens) if job.max_windows is None else job.max_windows * job.evaluation_window
    return [tokens[:limit]]


def _begun(conversion: CheckpointConversion, layout: Layout) -> CheckpointConversion:
    config = on_writer(layout, lambda: begin(conversion).config)
    return replace(conversion, config=config)


def _convert_in_order(job: MlaJob, conversion: CheckpointConversion, words: Sequence[str]) -> None:
    config = job.config
    options = parse_for_evaluation(words, seq_length=config.calibration_context)
    sequences = read_calibration(options, config)
    with tqdm(total=conversion.architecture.num_layers, desc="layers", leave=False) as bar:

        def done(summary: LayerSummary) -> None:
            bar.update()
            bar.write(summary.line)

        convert_layers_in_order(conversion, sequences, done=done)


def _write(conversion: CheckpointConversion) -> None:
    write_target(conversion)
    write_report(conversion, all_summaries(conversion), judgement=None)


def _scores(job: MlaJob, text: Path, words: Sequence[str], *, layout: Layout) -> TokenScores:
    """The NLL of every token of the evaluated text under one checkpoint.  Collective."""
    options = parse_for_evaluation(words, seq_length=job.evaluation_window)
    tokens = read_tokens(options, text, flag="--evaluation-text")
    windows = sliding_windows(
        len(tokens),
        window=job.evaluation_window,
        stride=job.evaluation_window,
        max_windows=job.max_windows,
    )
    stepper = open_stepper(options, layout=layout)
    return score_windows(options, stepper, tokens=tokens, windows=windows)


def _finish(
    job: MlaJob,
    conversion: CheckpointConversion,
    summaries: Sequence[LayerSummary],
    *,
    scores: Sequence[TokenScores],
) -> None:
    if len(scores) == 2:
        before, after = (mean_nll(s) for s in scores)
        difference: Mean = paired_difference(scores[1], scores[0])
        judgement = Judgement(
            text=str(job.evaluation_text),
            window=job.evaluation_window,
            num_tokens=before.num_tokens,
            before=math.exp(before.value),
            after=math.exp(after.value),
            difference=difference.value,
            standard_error=difference.standard_error,
        )
        job.say(judgement.line)
        write_report(conversion, summaries, judgement=judgement)
    shutil.rmtree(conversion.work)
