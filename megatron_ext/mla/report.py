"""What a conversion did, for people and for programs: conversion.html and conversion.json.

Both are written into the converted checkpoint's folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape

from megatron_ext.mla.checkpoint import CheckpointConversion
from megatron_ext.mla.layer_summary import LayerSummary
from megatron_ext.mla.pictures import error_picture, pairs_picture, values_picture
from megatron_ext.mla.sizes import CacheSize, converted_cache, original_cache
from megatron_ext.report.page_style import STYLE
from megatron_ext.report.whole_file import whole_file
from megatron_ext.weights.architecture import Architecture

RECORD, PAGE = "conversion.json", "conversion.html"
_RANKS = (1, 2, 4, 8)
_BYTES = 2
"""Of a number in the cache: bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Original and converted model on one text."""

    text: str
    window: int
    """Tokens."""
    num_tokens: int
    before: float
    """Perplexity."""
    after: float
    difference: float
    """Nats per token, after less before."""
    standard_error: float
    """Of the difference, paired, windows as draws."""

    @property
    def line(self) -> str:
        """In words."""
        return (
            f"perplexity {self.before:.4f} -> {self.after:.4f} (x {self.after / self.before:.3f}); "
            f"{self.difference:+.4f} +- {self.standard_error:.4f} nats per token, "
            f"{self.num_tokens} tokens in windows of {self.window}"
        )


@dataclass(frozen=True, kw_only=True)
class _CacheRow:
    tp_size: int
    before: int
    """Bytes of a token in all layers on each rank."""
    after: int


def write_report(
    conversion: CheckpointConversion,
    layers: Sequence[LayerSummary],
    *,
    judgement: Judgement | None,
) -> None:
    """Write both files into the target."""
    original = conversion.source.architecture
    before, after = original_cache(original), converted_cache(conversion.config, original)
    rows = _cache_rows(before, after, original)
    record = {
        "source": str(conversion.source.source.location),
        "options": asdict(conversion.config),
        "cache_numbers_per_token_and_layer": {"before": before.total, "after": after.total},
        "cache_bytes_per_token_and_rank": [asdict(row) for row in rows],
        "judgement": None if judgement is None else asdict(judgement),
        "layers": [asdict(layer) for layer in layers],
    }
    with whole_file(conversion.target / RECORD) as partial:
        partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    page = _page(conversion, layers, rows, judgement=judgement, ratio=after.total / before.total)
    with whole_file(conversion.target / PAGE) as partial:
        partial.write_text(page, encoding="utf-8")


def _cache_rows(before: CacheSize, after: CacheSize, original: Architecture) -> list[_CacheRow]:
    def size(cache: CacheSize, tp_size: int) -> int:
        return cache.num_bytes(
            tp_size=tp_size, num_layers=original.num_layers, bytes_per_number=_BYTES
        )

    return [
        _CacheRow(tp_size=t, before=size(before, t), after=size(after, t))
        for t in _RANKS
        if original.num_groups % t == 0
    ]


def _page(
    conversion: CheckpointConversion,
    layers: Sequence[LayerSummary],
    rows: Sequence[_CacheRow],
    *,
    judgement: Judgement | None,
    ratio: float,
) -> str:
    config, architecture = conversion.config, conversion.source.architecture
    num_pairs = architecture.head_size // 2
    said = "" if judgement is None else f"<p>{escape(judgement.line)}</p>"
    costs = [row.tp_size for row in rows if row.after >= row.before]
    if costs:
        said += (
            f'<p class="warning">With {", ".join(map(str, costs))} tensor-parallel ranks the '
            "latent takes more of each rank than the original cache: ranks divide KV heads, but "
            "not the latent.</p>"
        )
    caches = _table(
        ("tensor-parallel ranks", "original", "converted", "ratio"),
        [
            (str(r.tp_size), f"{r.before:,}", f"{r.after:,}", f"{r.after / r.before:.1%}")
            for r in rows
        ],
    )
    errors = _table(
        ("layer", "rotation lost", "keys", "values", "output", "beyond the rank", "seconds"),
        [
            (
                str(layer.layer),
                _share(layer.rotary_loss),
                _share(layer.key_error),
                _share(layer.value_error),
                _share(layer.output_error),
                _share(layer.tail_share),
                f"{layer.seconds:.1f}",
            )
            for layer in layers
        ],
    )
    pictures = "".join(
        f"<figure><figcaption><h3>{escape(title)}</h3></figcaption>{svg}</figure>"
        for title, svg in (
            ("Rotary pairs that are kept, by layer", pairs_picture(layers, num_pairs=num_pairs)),
            ("Relative squared errors, by layer", error_picture(layers)),
            ("Singular values of what is compressed", values_picture(layers)),
        )
    )
    options = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>"
        for name, value in asdict(config).items()
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Conversion to latent attention</title><style>{STYLE}</style></head><body><main>
<h1>{escape(conversion.target.name)}: latent attention, layout {config.mla_layout}</h1>
<p class="muted">From {escape(conversion.source.source.location.name)}
({escape(architecture.family)}); the cache is {ratio:.2%} of the original one.</p>
{said}
<h2>Cache: bytes of a token in all layers on each rank, {_BYTES} bytes a number</h2>
{caches}
<div class="plots">{pictures}</div>
<h2>Layers</h2><p class="muted">Squared errors, relative to what should be there.</p>
{errors}
<h2>Options</h2><div class="scroll"><table>{options}</table></div>
</main></body></html>
"""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f'<div class="scroll"><table>{line(head, "th")}{body}</table></div>'


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3%}"
