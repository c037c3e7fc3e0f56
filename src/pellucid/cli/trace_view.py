"""How traces, findings and analyses look in a terminal."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from pellucid.workload.formats import TraceFile
from pellucid.workload.lint import LintReport

_PIPE_WIDTH = 120  # a pipe has no width of its own


def console() -> Console:
    """Stdout, as wide as the terminal."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)


def table(*headings: str) -> Table:
    """A plain table: the first column to the left, numbers to the right."""
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for position, heading in enumerate(headings):
        made.add_column(heading, justify="left" if position == 0 or heading == "counting" else "right")
    return made


def print_lint(trace: TraceFile, report: LintReport) -> None:
    """The findings, each with its consequence and remedy."""
    out = console()
    skipped = f", {report.num_skipped:,} bad rows skipped" if report.num_skipped else ""
    out.print(f"[bold]{trace.path}[/bold]: {trace.format_name}, {report.num_requests:,} requests{skipped}")
    if not report.findings:
        out.print("[green]nothing to complain about[/green]")
    for finding in report.findings:
        place = f" (first at {finding.place})" if finding.place else ""
        out.print(f"[bold yellow]{finding.code}[/bold yellow]: {finding.num_rows:,} rows{place}: {finding.message}")
        out.print(f"  so: {finding.consequence}")
        if finding.mend:
            out.print(f"  mend: [cyan]pellucid {finding.mend}[/cyan]")
        else:
            out.print("  no transform mends this: see how the ids were made")


def print_analysis(document: dict[str, Any]) -> None:
    """The analysis in the order in which people ask."""
    out = console()
    arrivals, lengths = document["arrivals"], document["lengths"]
    out.print(f"[bold]{document['trace']}[/bold]: {document['format']}, {document['num_requests']:,} requests")
    if not document["sorted"]:
        out.print("rows were not in time order; analysed in time order")
    rows = table("", "mean", "p50", "p90", "p99", "max", "sum")
    for side in ("input", "output"):
        row = lengths[side]
        rows.add_row(f"{side} tokens", *(_count(row[key]) for key in ("mean", "p50", "p90", "p99", "max", "sum")))
    out.print(rows)
    if arrivals["requests_per_second"] is not None:
        spread = ", ".join(f"{value:.2f} per {width}" for width, value in arrivals["dispersion"].items())
        out.print(
            f"arrivals: {arrivals['requests_per_second']:.3g}/s over {document['span_seconds']:.4g} s, "
            f"busiest 10 s {arrivals['peak_requests_per_second']:.3g}/s; gap variation {arrivals['gap_cv']:.2f} "
            f"(Poisson 1); dispersion of counts {spread or 'unknown'} (Poisson 1)"
        )
    sessions = document["sessions"]
    if sessions["num_sessions"]:
        turns = f"{sessions['turns_mean']:.2f} turns on average, at most {sessions['turns_max']}"
        out.print(f"sessions: {sessions['num_sessions']:,}, {turns}")
    if document["tenants"]:
        out.print("tenants: " + ", ".join(f"{name} {count:,}" for name, count in document["tenants"].items()))
    _print_prefix(out, document["prefix"])
    if "ladder" in document:
        _print_ladder(out, document)


def _print_prefix(out: Console, reuse: dict[str, Any]) -> None:
    if reuse["token_hit_infinite"] is None:
        out.print(f"prefix reuse: unknown, {reuse['unknown_because']}")
        return
    about = "about " if reuse["sampled"] else ""
    rows = table("prefix reuse without a memory limit", "hit rate")
    rows.add_row("tokens (equal partial tails count)", f"{about}{reuse['token_hit_infinite']:.3f}")
    rows.add_row(f"blocks of {reuse['block_size']}", f"{about}{reuse['block_hit_infinite']:.3f}")
    rows.add_row("engine-legal (full blocks, one token computed)", f"{about}{reuse['engine_hit_infinite']:.3f}")
    rows.add_row("requests with any hit", f"{about}{reuse['request_hit_infinite']:.3f}")
    later = reuse["with_generated"]
    if later["rate"] is not None:
        rows.add_row(f"with generated tokens of earlier turns ({later['basis']})", f"{later['rate']:.3f}")
    bounds = reuse["bounds"]
    if bounds["lower"] is not None and bounds["engine_block"] != reuse["block_size"]:
        rows.add_row(
            f"an engine with blocks of {bounds['engine_block']}", f"{bounds['lower']:.3f} to {bounds['upper']:.3f}"
        )
    out.print(rows)
    curve = table("cache of", "of all distinct", "LRU", "Pellucid", "best possible")
    for point in reuse["curve"]:
        curve.add_row(
            f"{_count(point['cache_tokens'])} tokens",
            f"{point['cache_tokens'] / reuse['distinct_tokens']:.1%}",
            _with_error(point["lru"], point["lru_error"]),
            f"{point['pellucid']:.3f}" if "pellucid" in point else "",
            _with_error(point["belady"], point["belady_error"]),
        )
    out.print(curve)


def _print_ladder(out: Console, document: dict[str, Any]) -> None:
    rows = table("device-seconds", "needed", "compute", "memory", "devices for the span", "counting")
    for label, rungs in (("no reuse", document["ladder_no_reuse"]), ("reuse", document["ladder"])):
        for rung in rungs:
            compute, memory, span = (rung.get(key) for key in ("compute_seconds", "memory_seconds", "devices_for_span"))
            rows.add_row(
                f"{rung['rung']} ({label})",
                f"{rung['device_seconds']:,.0f}",
                f"{compute:,.0f}" if compute is not None else "",
                f"{memory:,.0f}" if memory is not None else "",
                f"{span:.2f}" if span is not None else "",
                rung.get("cache", "") if rung["rung"] in ("capacity", "policy") else rung["meaning"],
            )
    out.print(rows)
    if "ladder_stops_because" in document:
        out.print(document["ladder_stops_because"])
        return
    best = document["perfect_scheduler"]
    speed = f", the trace at {best['trace_speed']:.2f} x its speed" if best["trace_speed"] else ""
    out.print(
        f"on {document['num_devices']} x {document['hardware'] or 'this machine'} a perfect scheduler reaches "
        f"{best['output_tokens_per_second']:,.0f} output tokens/s, {best['requests_per_second']:.3g} requests/s{speed}"
    )


def _with_error(value: float, error: float) -> str:
    return f"{value:.3f} ± {2 * error:.3f}" if error else f"{value:.3f}"


def _count(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            scale = 1e3 if unit == "k" else size
            return f"{value / scale:.4g}{unit}"
    return f"{value:,.0f}"
