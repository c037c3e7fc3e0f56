"""The roofline with a plan's operating points on it, and decode latency and throughput against batch.

Needs matplotlib (the `plot` extra); nothing else in the planner does, so it is imported when a plot is drawn. An HTML
file holds the drawing as inline SVG and fetches nothing.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.core.errors import ConfigError
from pellucid.planner.plan import BatchPoint, Plan
from pellucid.planner.quantity import format_flops, format_rate, format_seconds
from pellucid.planner.roofline import StepCost

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".html", ".svg", ".png")
_BESIDE: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8}
_MEMORY, _COMPUTE, _PREFILL, _INK = "#0072b2", "#d55e00", "#009e73", "#444444"


def write_plot(plan: Plan, path: Path) -> None:
    """Draw `plan` into `path`, an .html, .svg or .png file. Raises ConfigError where that cannot be done."""
    if path.suffix not in FORMATS:
        raise ConfigError(f"--plot {path}: the name must end in {', '.join(FORMATS)}")
    if plan.roofline.peak is None or plan.device.bandwidth is None:
        raise ConfigError(f"a roofline needs a rate and a bandwidth, and {plan.device.name} lacks one; pass --flops")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plots need matplotlib; `pip install pellucid[plot]`") from None
    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_roofline(left, plan, plan.roofline.peak, plan.device.bandwidth)
    _draw_latency(right, plan)
    context = f", context {plan.scenario.full_context:,}" if plan.shape.has_layers else ""
    figure.suptitle(f"{plan.shape.name} on {plan.device.title}{context}")
    try:
        path.write_bytes(_rendered(figure, path.suffix))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None


def _rendered(figure: Any, suffix: str) -> bytes:
    import matplotlib as mpl

    buffer = io.BytesIO()
    # Without a date and with fixed element ids the same plan gives the same bytes.
    with mpl.rc_context({"svg.hashsalt": "pellucid", "svg.fonttype": "none"}):
        if suffix == ".png":
            figure.savefig(buffer, format="png", dpi=130)
            return buffer.getvalue()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    if suffix == ".svg":
        return svg
    drawing = svg[svg.index(b"<svg") :]
    head = b"<!doctype html><meta charset='utf-8'><title>Roofline</title>"
    return head + b"<style>svg{max-width:100%;height:auto}</style>" + drawing


def _draw_roofline(axes: Axes, plan: Plan, peak: float, bandwidth: float) -> None:
    ridge = peak / bandwidth
    points = [(f"decode x {p.batch:,}", p.cost, _MEMORY) for p in _spread(plan.batches)]
    points.append(("prefill", plan.prefill[-1], _PREFILL))
    intensities = [cost.intensity for _, cost, _ in points]
    low, high = min(*intensities, ridge) / 3, max(*intensities, ridge) * 4
    axes.plot([low, ridge], [low * bandwidth, peak], color=_MEMORY, lw=2)
    axes.plot([ridge, high], [peak, peak], color=_COMPUTE, lw=2)
    axes.plot([ridge, ridge], [low * bandwidth, peak], color=_INK, lw=0.8, ls=":")
    middle = (low * ridge) ** 0.5
    axes.annotate(format_rate(bandwidth), (middle, middle * bandwidth), (-8, 8), ha="right", color=_MEMORY, **_BESIDE)
    axes.annotate(format_flops(peak, "FLOP/s"), (ridge, peak), (0, 6), color=_COMPUTE, **_BESIDE)
    axes.annotate(f"ridge {ridge:.0f} FLOP/B", (ridge, low * bandwidth * 1.3), color=_INK, ha="right", fontsize=8)
    for label, cost, color in points:
        reached = _reached(cost)
        axes.plot([cost.intensity], [reached], "o", color=color, ms=7)
        axes.annotate(label, (cost.intensity, reached), (8, -12), color=color, **_BESIDE)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low * bandwidth, peak * 2.5))
    axes.set(xlabel="FLOP per byte moved", ylabel="FLOP/s reached", title="roofline")
    axes.yaxis.set_major_formatter(lambda value, _: format_flops(value, ""))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(True, which="major", alpha=0.25)


def _draw_latency(axes: Axes, plan: Plan) -> None:
    largest = plan.max_sequences or 256
    batches = sorted({max(1, round(largest ** (i / 40))) for i in range(41)})
    points = [plan.decode_at(b) for b in batches]
    axes.plot(batches, [p.cost.seconds * 1e3 for p in points], color=_MEMORY, lw=2)
    axes.set(xscale="log", xlabel="sequences decoded together", title="decode against batch")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("time of a step = gap between tokens, ms", color=_MEMORY)
    other = axes.twinx()
    other.plot(batches, [p.tokens_per_second for p in points], color=_COMPUTE, lw=2, ls="--")
    other.set(yscale="log")
    for axis in (axes.xaxis, other.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in "25" else "")
    other.set_ylabel("tokens/s, all sequences (dashed)", color=_COMPUTE)
    slo = plan.scenario.slo_itl_seconds
    if slo is not None:
        axes.axhline(slo * 1e3, color=_INK, lw=0.8, ls=":")
        axes.annotate(f"objective {format_seconds(slo)}", (batches[0], slo * 1e3), color=_INK, fontsize=8, va="bottom")
    axes.grid(True, which="major", alpha=0.25)


def _spread(points: tuple[BatchPoint, ...]) -> list[BatchPoint]:
    """Points far enough apart for their labels: at least a quarter more intensity than the one before, but the last."""
    kept: list[BatchPoint] = []
    for point in points:
        if not kept or point.cost.intensity > 1.25 * kept[-1].cost.intensity:
            kept.append(point)
    return kept


def _reached(cost: StepCost) -> float:
    """FLOP/s that the step runs at."""
    return cost.flops / cost.seconds
