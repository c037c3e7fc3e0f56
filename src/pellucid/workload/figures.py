"""Figures for the reports: plotly data, made from plain series. Only this file and `report.py` know plotly exists."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from pellucid.core.errors import PellucidError
from pellucid.workload.metrics import Clocking, RequestRecord

COLOURS = ("#0b6bcb", "#c2410c", "#15803d", "#7c3aed", "#be185d", "#0e7490")
_MAX_POINTS = 4000
_STALL_FACTOR = 5.0


def graph_objects() -> Any:
    """plotly's figure classes. Raises PellucidError where the optional library is absent."""
    return _plotly("plotly.graph_objects")


def plotly_script() -> str:
    """plotly's JavaScript, to be written into a page. Raises PellucidError where the optional library is absent."""
    return str(_plotly("plotly.offline").get_plotlyjs())


def _plotly(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise PellucidError("HTML reports need plotly; install it with `pip install 'pellucid[plot]'`") from None


def _figure(title: str, x: str, y: str, **layout: Any) -> Any:
    go = graph_objects()
    figure = go.Figure()
    figure.update_layout(
        title=title,
        xaxis_title=x,
        yaxis_title=y,
        template="plotly_white",
        height=380,
        margin={"l": 60, "r": 20, "t": 50, "b": 50},
        legend={"orientation": "h", "y": -0.25},
        **layout,
    )
    return figure


def _line(figure: Any, name: str, x: Sequence[float], y: Sequence[float], colour: int, **more: Any) -> None:
    go = graph_objects()
    colours = {"color": COLOURS[colour % len(COLOURS)]}
    figure.add_trace(go.Scatter(x=list(x), y=list(y), name=name, mode="lines", line=colours, **more))


def _steps(figure: Any, name: str, edges: Sequence[float], heights: Sequence[float], colour: int) -> None:
    """A histogram as a line; there is one edge more than heights."""
    _line(figure, name, edges, [*heights, *heights[-1:]], colour, line_shape="hv")


def _thin(values: Sequence[float]) -> list[float]:
    """At most a few thousand of the values, evenly picked from the sorted list."""
    ordered = sorted(values)
    if len(ordered) <= _MAX_POINTS:
        return ordered
    return [ordered[int(i)] for i in np.linspace(0, len(ordered) - 1, _MAX_POINTS)]


def cdf(title: str, unit: str, series: dict[str, Sequence[float]]) -> Any:
    """Cumulative distributions as steps, one line a series, on a logarithmic axis."""
    figure = _figure(title, unit, "share at or below", xaxis_type="log")
    for number, (name, values) in enumerate(series.items()):
        ordered = _thin([value for value in values if value > 0])
        if ordered:
            shares = (np.arange(1, len(ordered) + 1) / len(ordered)).tolist()
            label = f"{name} (n {len(values):,})"
            _line(figure, label, [ordered[0], *ordered], [0.0, *shares], number, line_shape="hv")
    return figure


def analysis_figures(document: dict[str, Any], figures: dict[str, Any]) -> list[Any]:
    """The five figures of an analysis: lengths, arrivals, reuse distance, capacity curve, ladder."""
    lengths = _figure("Lengths", "tokens", "requests", xaxis_type="log")
    for number, side in enumerate(("inputs", "outputs")):
        _steps(lengths, side, figures[side]["edges"], figures[side]["num_requests"], number)
    arrivals = _figure("Arrivals", "seconds", "requests a second")
    _line(arrivals, "rate", figures["times"]["seconds"], figures["times"]["requests_per_second"], 0)
    made = [lengths, arrivals]
    if document["prefix"]["curve"]:
        distance = figures["reuse_distance"]
        reuse = _figure("Reuse distance", "distinct tokens since the last use", "share of block uses", xaxis_type="log")
        _steps(reuse, "uses", distance["edges"], distance["share"], 0)
        made += [reuse, _capacity(document["prefix"])]
    if "ladder" in document:
        made.append(_ladder(document))
    return made


def _capacity(reuse: dict[str, Any]) -> Any:
    figure = _figure("Capacity curve", "cache, tokens", "token hit rate", xaxis_type="log")
    curve = reuse["curve"]
    sizes = [point["cache_tokens"] for point in curve]
    for number, (key, name) in enumerate((("lru", "LRU"), ("belady", "best possible"), ("pellucid", "Pellucid"))):
        rates = [point.get(key) for point in curve]
        errors = [2 * point.get(f"{key}_error", 0.0) for point in curve]
        bars = {"error_y": {"array": errors}} if any(errors) else {}
        _line(figure, name, sizes, rates, number, **bars)
    figure.add_hline(y=reuse["token_hit_infinite"], line_dash="dot", annotation_text="no memory limit")
    return figure


def _ladder(document: dict[str, Any]) -> Any:
    go = graph_objects()
    figure = _figure("Ladder of ceilings", "", "device-seconds")
    for number, (label, rungs) in enumerate((("no reuse", document["ladder_no_reuse"]), ("reuse", document["ladder"]))):
        names = [rung["rung"] for rung in rungs]
        seconds = [rung["device_seconds"] for rung in rungs]
        figure.add_trace(go.Bar(x=names, y=seconds, name=label, marker_color=COLOURS[number]))
    return figure


def run_figures(records: Sequence[RequestRecord], clocking: Clocking) -> list[Any]:
    """Of a load run: latencies over time, distributions, gaps with stalls marked, tenants and causes where known."""
    answered = [record for record in records if record.ok]
    made = [
        _over_time(answered, clocking),
        cdf("Time to first token", "seconds", {"TTFT": [clocking.ttft(r) or 0.0 for r in answered]}),
        cdf("Between tokens", "seconds", _gap_series(answered)),
        _gaps(answered),
    ]
    for field in ("group", "tenant"):
        names = sorted({getattr(record, field) for record in answered})
        if len(names) > 1:
            series: dict[str, Sequence[float]] = {
                name: [clocking.ttft(r) or 0.0 for r in answered if getattr(r, field) == name] for name in names
            }
            made.append(cdf(f"Time to first token by {field}", "seconds", series))
    if any(record.ledger for record in answered):
        made.append(_causes(answered))
    return made


def comparison_figures(runs: Sequence[tuple[str, Sequence[RequestRecord]]], clocking: Clocking) -> list[Any]:
    """Of several labelled runs of one load: their first tokens and their gaps, one line a run."""
    answered = [(label, [record for record in records if record.ok]) for label, records in runs]
    first: dict[str, Sequence[float]] = {label: [clocking.ttft(r) or 0.0 for r in good] for label, good in answered}
    gaps: dict[str, Sequence[float]] = {label: [gap for r in good for gap in r.icl()] for label, good in answered}
    return [cdf("Time to first token", "seconds", first), cdf("Gaps between chunks (ICL)", "seconds", gaps)]


def _gap_series(records: Sequence[RequestRecord]) -> dict[str, Sequence[float]]:
    return {
        "chunk gaps (ICL)": [gap for record in records for gap in record.icl()],
        "per token (ITL)": [gap for record in records for gap in (record.itl() or [])],
        "per request (TPOT)": [value for record in records if (value := record.tpot()) is not None],
    }


def _over_time(records: Sequence[RequestRecord], clocking: Clocking) -> Any:
    figure = _figure("Time to first token over the run", "start, seconds", "seconds", yaxis_type="log")
    if not records:
        return figure
    starts = np.array([clocking.start(record) for record in records])
    values = np.array([clocking.ttft(record) or 0.0 for record in records])
    edges = np.linspace(starts.min(), starts.max() + 1e-9, min(40, max(2, len(records) // 5)) + 1)
    place = np.clip(np.searchsorted(edges, starts, side="right") - 1, 0, len(edges) - 2)
    filled = [i for i in range(len(edges) - 1) if (place == i).any()]
    for number, percentile in enumerate((50, 90, 99)):
        heights = [float(np.percentile(values[place == i], percentile)) for i in filled]
        _line(figure, f"p{percentile}", [float(edges[i]) for i in filled], heights, number)
    return figure


def _gaps(records: Sequence[RequestRecord]) -> Any:
    """The largest gaps, each where it happened; those beyond five times the median are stalls."""
    go = graph_objects()
    points = [(after.at, after.at - before.at) for r in records for before, after in zip(r.chunks, r.chunks[1:])]
    figure = _figure("Gaps between chunks", "when, seconds", "seconds")
    if not points:
        return figure
    median = float(np.median([gap for _, gap in points]))
    stalls = sorted((p for p in points if p[1] > _STALL_FACTOR * median), key=lambda p: -p[1])[:_MAX_POINTS]
    steady = [p for p in points if p[1] <= _STALL_FACTOR * median]
    steady = steady[:: max(1, len(steady) // _MAX_POINTS)]
    for number, (name, chosen) in enumerate((("steady", steady), (f"stall (over {_STALL_FACTOR:g} x median)", stalls))):
        marker = {"size": 4 + 2 * number, "color": COLOURS[number]}
        x, y = [p[0] for p in chosen], [p[1] for p in chosen]
        figure.add_trace(go.Scattergl(x=x, y=y, name=name, mode="markers", marker=marker))
    return figure


def _causes(records: Sequence[RequestRecord]) -> Any:
    """Where the server says the time went, summed over requests."""
    go = graph_objects()
    sums: dict[str, float] = {}
    for record in records:
        for cause, seconds in ((record.ledger or {}).get("causes") or {}).items():
            sums[cause] = sums.get(cause, 0.0) + float(seconds)
    ordered = sorted(sums.items(), key=lambda item: item[1])
    figure = _figure("Where the time went (the server's ledger)", "seconds, all requests", "")
    bars = go.Bar(x=[s for _, s in ordered], y=[c for c, _ in ordered], orientation="h", marker_color=COLOURS[0])
    figure.add_trace(bars)
    return figure
