"""Curves as inline SVG for the report page: which metrics share a plot, and how one is drawn.

The SVG carries no fixed colours: text takes the page's (`currentColor`), grid and curves the CSS
variables `--grid` and `--series-0` ... `--series-5`, so one drawing serves a light and a dark page.
matplotlib is imported at the first drawing; importing this module costs nothing.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from megatron_ext.report.history import Envelope

NUM_COLOURS = 6
_SHARES = (
    "invalid_share",
    "truncated_share",
    "zero_variance_group_share",
    "zero_advantage_share",
    "padding_share",
)
FIRST_PLOTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Held-out pass rate", ("eval_pass_rate", "eval_pass_rate_sampled")),
    ("Reward", ("reward_mean", "pass_rate")),
    ("Loss", ("loss", "validation_loss", "eval_loss")),
    ("Gradient norm", ("grad_norm",)),
    ("Learning rate", ("lr", "learning_rate")),
    ("Tokens per second", ("tokens_per_second",)),
    ("Memory (GiB)", ("*memory_bytes",)),
    ("Sampled tokens of an episode", ("response_tokens_*",)),
    ("Shares of episodes and groups", _SHARES),
    ("Clipped tokens", ("clip_fraction_*",)),
    ("Ratio to the old policy", ("ratio", "ratio_squared")),
    ("Seconds of each phase", ("*_seconds",)),
    ("Tokens per second of each phase", ("*_tokens_per_second",)),
)
"""Plots that come first, in this order: title, and the names or patterns of the metrics in it."""

_TEXT, _GRID = "#010203", "#040506"  # stand-ins: exact in the SVG, then replaced by the page's


@dataclass(frozen=True, kw_only=True)
class PlotGroup:
    """The metrics of one plot, which share its axis."""

    title: str
    names: tuple[str, ...]
    unit: float = 1.0
    """What the values are divided by for drawing (2**30 for bytes)."""


def group_metrics(names: Iterable[str]) -> list[PlotGroup]:
    """Every metric in exactly one plot: the well-known ones first, then each other by itself."""
    left = list(names)
    groups = []
    for title, patterns in FIRST_PLOTS:
        members = [name for name in left if any(fnmatchcase(name, p) for p in patterns)]
        if members:
            unit = 2.0**30 if "GiB" in title else 1.0
            groups.append(PlotGroup(title=title, names=tuple(members), unit=unit))
            left = [name for name in left if name not in members]
    return groups + [PlotGroup(title=name, names=(name,)) for name in left]


def load_plotting() -> None:
    """Import what `draw_svgs` needs: a second, once, that would else be taken for drawing time."""
    import matplotlib.backends.backend_svg
    import matplotlib.figure  # noqa: F401  (the import is the purpose)


def draw_svgs(plots: Sequence[Sequence[Envelope]], *, steps: tuple[int, int]) -> list[str]:
    """An `<svg>` element for each plot's curves, the i-th curve in colour `--series-i`.

    steps: first and last step of every plot's axis.
    """
    import matplotlib
    from matplotlib.transforms import Bbox

    svgs = []
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure, axes = _empty_plot(steps)
        for curves in plots:  # in the same axes: making new ones takes longer than all the rest
            for index, curve in enumerate(curves):
                _draw_curve(axes, curve, colour=_stand_in(index))
            text = io.StringIO()
            figure.savefig(text, format="svg", transparent=True, metadata=no_metadata)
            svgs.append(_for_page(text.getvalue(), num_curves=len(curves)))
            for artist in [*axes.lines, *axes.collections]:
                artist.remove()
            axes.dataLim = Bbox.null()
    return svgs


def _empty_plot(steps: tuple[int, int]):
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6.4, 2.7))
    axes = figure.add_axes((0.115, 0.165, 0.865, 0.745))
    axes.grid(True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=9, labelcolor=_TEXT)
    first, last = steps
    margin = max(0.02 * (last - first), 0.5)
    axes.set_xlim(first - margin, last + margin)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.get_offset_text().set_color(_TEXT)
    axes.set_xlabel("step", fontsize=9, color=_TEXT, labelpad=2)
    return figure, axes


def _draw_curve(axes, curve: Envelope, *, colour: str) -> None:
    steps, mean = curve.steps, curve.mean
    if not curve.is_exact:
        axes.fill_between(steps, curve.low, curve.high, color=colour, alpha=0.22, linewidth=0)
    axes.plot(steps, mean, color=colour, linewidth=1.4)
    is_point = np.isfinite(mean)
    alone = is_point.copy()  # a point without neighbours is no line: mark it
    alone[1:] &= ~is_point[:-1]
    alone[:-1] &= ~is_point[1:]
    if alone.any():
        axes.plot(steps[alone], mean[alone], "o", color=colour, markersize=4)


def _stand_in(index: int) -> str:
    return f"#0a0b{index % NUM_COLOURS + 16:02x}"


def _for_page(svg: str, *, num_curves: int) -> str:
    """matplotlib's file as an element: no prolog or idle ids, short numbers, the page's colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"<style.*?</style>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r" font-family: [^;]*;", "", svg)
    svg = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", svg)
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), svg)
    svg = svg.replace(_TEXT, "currentColor").replace(_GRID, "var(--grid)")
    for index in range(min(num_curves, NUM_COLOURS)):
        svg = svg.replace(_stand_in(index), f"var(--series-{index})")
    return svg
