"""Pictures of a conversion as inline SVG: kept pairs, errors, singular values.

matplotlib is imported at the first drawing.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megatron_ext.mla.layer_summary import LayerSummary

_GREY = "#808890"
"""Of text and axes: to be read on light and on dark."""
_SHOWN_LAYERS = 5


def pairs_picture(layers: Sequence[LayerSummary], *, num_pairs: int) -> str:
    """In how many rotary keys of each layer (rows) each pair (columns, fast to slow) turns."""
    counts = np.zeros((len(layers), num_pairs))
    for row, layer in enumerate(layers):
        for pairs in layer.pairs:
            counts[row, pairs] += 1

    def draw(figure: Any, axes: Any) -> None:
        image = axes.imshow(counts, aspect="auto", interpolation="nearest", cmap="viridis")
        axes.set_xlabel("rotary pair, fastest first")
        axes.set_ylabel("layer")
        bar = figure.colorbar(image, ax=axes)
        bar.ax.tick_params(colors=_GREY, labelsize=8)

    return _drawn(draw)


def error_picture(layers: Sequence[LayerSummary]) -> str:
    """Errors of keys, values and output, and the lost rotation."""
    numbers = [layer.layer for layer in layers]
    curves = {
        "keys": [layer.key_error for layer in layers],
        "values": [layer.value_error for layer in layers],
        "output": [layer.output_error for layer in layers],
        "rotation": [layer.rotary_loss for layer in layers],
    }

    def draw(_: Any, axes: Any) -> None:
        for name, values in curves.items():
            known = [np.nan if v is None or v <= 0 else v for v in values]
            if not np.isnan(known).all():
                axes.semilogy(numbers, known, marker=".", label=name)
        axes.set_xlabel("layer")
        _legend(axes)

    return _drawn(draw)


def values_picture(layers: Sequence[LayerSummary]) -> str:
    """Singular values, over the largest, of a few layers."""
    step = max(1, len(layers) // _SHOWN_LAYERS)

    def draw(_: Any, axes: Any) -> None:
        for layer in layers[::step]:
            values = np.array(layer.singular_values)
            if len(values) and values[0] > 0:
                share = np.linspace(0, 1, len(values))
                shown = np.where(values > 0, values / values[0], np.nan)
                axes.semilogy(share, shown, label=f"layer {layer.layer}")
        axes.set_xlabel("share of all singular values")
        _legend(axes)

    return _drawn(draw)


def _legend(axes: Any) -> None:
    if axes.lines:
        axes.legend(fontsize=8, labelcolor=_GREY, frameon=False)


def _drawn(draw: Callable[[Any, Any], None]) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "mla"}):
        figure = Figure(figsize=(6.4, 3.2), layout="constrained")
        axes = figure.subplots()
        axes.tick_params(colors=_GREY, labelsize=8)
        axes.xaxis.label.set_color(_GREY)
        axes.yaxis.label.set_color(_GREY)
        axes.spines[:].set_color(_GREY)
        draw(figure, axes)
        text = io.StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=no_metadata)
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
