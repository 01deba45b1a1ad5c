"""report.html as one text: state, key figures, plots, options and command of a run.

Self-contained: style and drawings are inside, there is no script, and links go to files beside it;
it opens from file:// on any screen, light or dark.  Values are shown as they were logged, negative
ones and those that are not finite too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from html import escape

from megatron_ext.report.history import History, Summary, envelope, summarise
from megatron_ext.report.output_folder import CONFIG_NAME, METRICS_NAME
from megatron_ext.report.page_style import STYLE
from megatron_ext.report.plots import NUM_COLOURS, PlotGroup, draw_svgs, group_metrics
from megatron_ext.report.run_record import RunRecord
from megatron_ext.report.sink import Outcome

MAX_POINTS = 300
"""Points of a curve; in a longer series each is the mean of a stretch, in a band low to high."""
REFRESH_SECONDS = 30
"""How often a browser reads the page again while the run goes."""
KILLED_HINT = "; if that is long ago, the run was killed, and the same command continues it"


@dataclass(frozen=True, kw_only=True)
class Page:
    """What a page shows."""

    title: str
    outcome: Outcome
    history: History
    record: RunRecord
    updated: str
    """When the page was drawn, in words."""


def render_page(page: Page) -> str:
    """The page as HTML."""
    summaries = {name: summarise(series) for name, series in page.history.series.items()}
    refresh = ""
    if page.outcome.status == "running":
        refresh = f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">'
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{refresh}
<title>{escape(page.title)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
{_header(page)}
{_tiles(page)}
{_figures_table(summaries)}
<section class="plots">{_plots(page.history, summaries)}</section>
{_details("Options", _table(page.record.options))}
{_details("Versions", _table(_versions(page.record)))}
<h2>Command</h2>
<pre>{escape(page.record.command)}</pre>
<footer>Drawn from <a href="{METRICS_NAME}">{METRICS_NAME}</a> and
<a href="{CONFIG_NAME}">{CONFIG_NAME}</a>.</footer>
</main>
</body>
</html>
"""


def format_value(name: str, value: float) -> str:
    """A metric's value for reading; bytes in binary units, everything else to 6 digits."""
    if not math.isfinite(value):
        return str(value)
    if name.endswith("bytes"):
        for unit in ("B", "KiB", "MiB", "GiB"):
            if abs(value) < 1024:
                return f"{value:.4g} {unit}"
            value /= 1024
        return f"{value:.4g} TiB"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.6g}"


def _header(page: Page) -> str:
    step, total = page.history.last_step, page.record.total_steps
    status = page.outcome.status
    words = status.capitalize()
    if step is not None:
        words += f" at step {step:,}" + ("" if total is None else f" of {total:,}")
    bar = ""
    if total and step is not None:
        bar = f'<progress max="{total}" value="{step}"></progress>'
    failure = ""
    if status == "stopped":
        failure = f"<p>{escape(page.outcome.reason)}</p>"
    elif page.outcome.reason:
        details = _details("Traceback", f"<pre>{escape(page.outcome.details)}</pre>")
        failure = f'<div class="failure">{escape(page.outcome.reason)}{details}</div>'
    gaps = ""
    if page.outcome.gaps:
        lines = "".join(f"<li>{escape(gap)}</li>" for gap in page.outcome.gaps)
        gaps = f'<div class="warning">The record is incomplete:<ul>{lines}</ul></div>'
    hint = KILLED_HINT if status == "running" else ""
    return f"""<header><h1>{escape(page.title)}</h1>
<p><span class="status {status}">{words}</span>
<span class="muted">updated {escape(page.updated)}{hint}</span></p>
{bar}{failure}{gaps}</header>"""


def _tiles(page: Page) -> str:
    """The figures one looks for first."""
    series, tiles = page.history.series, []
    if "loss" in series:
        tiles.append(("loss", format_value("loss", series["loss"].values[-1])))
    if "eval_pass_rate" in series:
        rates = series["eval_pass_rate"].values
        text = " to ".join(f"{rate:.3f}" for rate in (rates[0], rates[-1]))
        tiles.append(("held-out pass rate", text))
    if "tokens" in series:
        tiles.append(("tokens", format_value("tokens", math.fsum(series["tokens"].values))))
    if "seconds" in series:
        seconds = math.fsum(value for value in series["seconds"].values if math.isfinite(value))
        tiles.append(("time in steps", str(timedelta(seconds=round(seconds)))))
    tiles.append(("processes", str(page.record.world_size)))
    cells = "".join(f"<div><span>{label}</span><b>{text}</b></div>" for label, text in tiles)
    return f'<section class="tiles">{cells}</section>'


def _figures_table(summaries: Mapping[str, Summary]) -> str:
    rows = []
    for name, summary in summaries.items():
        best = _best_end(name)
        cells = f"<td>{format_value(name, summary.first)}</td>"
        cells += f"<td><b>{format_value(name, summary.last)}</b></td>"
        for end, at in (("lowest", summary.lowest), ("highest", summary.highest)):
            text = ""
            if at is not None:
                text = f"{format_value(name, at[0])} <small>step {at[1]:,}</small>"
            cells += f'<td class="best">{text}</td>' if end == best else f"<td>{text}</td>"
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
    if not rows:
        return '<p class="muted">No step has been logged yet.</p>'
    return (
        '<h2>Key figures</h2><div class="scroll"><table class="figures"><thead><tr><th>metric</th>'
        "<th>first</th><th>last</th><th>lowest</th><th>highest</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        '<p class="muted">Coloured: the best value, where the name says which end is good.</p>'
    )


def _best_end(name: str) -> str | None:
    """Which end of a metric is good, as far as its name tells."""
    if any(word in name for word in ("reward", "pass", "accuracy", "score", "per_second")):
        return "highest"
    return "lowest" if any(word in name for word in ("loss", "perplexity", "error")) else None


def _plots(history: History, summaries: Mapping[str, Summary]) -> str:
    groups = group_metrics(history.series)
    curves = [
        [envelope(history.series[n], max_points=MAX_POINTS, unit=group.unit) for n in group.names]
        for group in groups
    ]
    svgs = draw_svgs(curves, steps=(history.first_step or 0, history.last_step or 0))
    return "".join(_plot(group, svg, summaries) for group, svg in zip(groups, svgs, strict=True))


def _plot(group: PlotGroup, svg: str, summaries: Mapping[str, Summary]) -> str:
    legend, notes = [], []
    for index, name in enumerate(group.names):
        last = format_value(name, summaries[name].last)
        legend.append(
            f'<span class="key"><i style="background:var(--series-{index % NUM_COLOURS})"></i>'
            f"{escape(name)} <b>{last}</b></span>"
        )
        if summaries[name].num_nonfinite:
            notes.append(
                f"{escape(name)}: {summaries[name].num_nonfinite:,} not finite, "
                f"first at step {summaries[name].first_nonfinite_step:,}"
            )
    note = f'<p class="warning">{"; ".join(notes)}</p>' if notes else ""
    return (
        f"<figure><figcaption><h3>{escape(group.title)}</h3>{''.join(legend)}</figcaption>"
        f"{svg}{note}</figure>"
    )


def _versions(record: RunRecord) -> dict[str, object]:
    return {
        **record.versions,
        "git commit": record.git_commit,
        "started": record.started,
        "resumed from step": record.resume_step,
    }


def _table(rows: Mapping[str, object]) -> str:
    cells = "".join(
        f"<tr><th scope='row'>{escape(name)}</th><td>{escape(_option(value))}</td></tr>"
        for name, value in rows.items()
    )
    return f'<div class="scroll"><table><tbody>{cells}</tbody></table></div>'


def _option(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _details(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>{body}</details>"
