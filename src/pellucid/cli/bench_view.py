"""How runs, searches, sweeps and comparisons look in a terminal. The three golden numbers come first."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape

from pellucid.cli.trace_view import console, table
from pellucid.workload.compare import pairing, ratio_rows
from pellucid.workload.metrics import Summary
from pellucid.workload.report import ratio_cells, seconds

_ROWS = (
    ("ttft", "TTFT"),
    ("itl", "ITL, per token"),
    ("tpot", "TPOT, per request"),
    ("icl", "ICL, per chunk"),
    ("stall", "worst gap of a request"),
    ("e2e", "E2E"),
    ("ttft_send", "TTFT from sending"),
    ("send_lag", "send lag (client)"),
)


def print_run(document: dict[str, Any]) -> None:
    """One run: golden numbers, distributions, what the load was for, failures, validity."""
    out = console()
    target = document["target"]
    out.print(
        f"[bold]{document['workload']}[/bold] on {escape(target['model'])} at {target['url']}, {document['loop']} loop"
    )
    for reason in document["invalid_because"]:
        out.print(f"[bold red]invalid[/bold red]: {escape(reason)}")
    golden = "TTFT {} / {}, ITL {} / {}, TPOT {} / {} (p50 / p99)".format(
        *(seconds(value) for key in ("ttft", "itl", "tpot") for value in (document[key].p50, document[key].p99))
    )
    attained = f"{document['attainment']:.1%}" if document["attainment"] is not None else "none"
    out.print(
        f"{golden}, [bold]{document['output_tokens_per_second']:,.1f} output tokens/s[/bold], goodput "
        f"{document['goodput']:.3g} requests/s ({attained} of {document['num_requests']:,} offered)"
    )
    rows = table("", "n", "p50", "p90", "p99", "max", "mean")
    for key, name in _ROWS:
        _add(rows, name, document[key])
    out.print(rows)
    _print_highlights(out, document["highlights"])
    for name, failure in document["failures"].items():
        out.print(f"[red]{failure['num_requests']:,} x {name}[/red]: {escape(failure['example'])}")
    if document["gaps_over_slo"] is not None:
        out.print(f"gaps longer than the objective between tokens: {document['gaps_over_slo']:.2%}")
    cached = document["cached"]
    if cached["observed"] is not None and cached["expected"] is not None:
        shares = f"{cached['observed']:.1%}, shared by the load: {cached['expected']:.1%}"
        out.print(f"prompt tokens from the server's cache: {shares}")
    if document["num_counts_unknown"]:
        out.print(f"{document['num_counts_unknown']:,} replies did not tell tokens per chunk: no ITL for them")
    for tool, columns in document.get("compat", {}).items():
        parts = (
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {seconds(value.p50)} / {seconds(value.p99)}"
            for name, value in columns.items()
        )
        out.print(f"as {tool} prints it: " + ", ".join(parts))
    if _any_low(document):
        out.print("* too few values behind this percentile")


def _any_low(document: dict[str, Any]) -> bool:
    return any(document[key].low_n for key, _ in _ROWS)


def _add(rows: Any, name: str, summary: Summary) -> None:
    if not summary.n:
        return
    cells = [
        seconds(getattr(summary, key)) + ("*" if key in summary.low_n else "") for key in ("p50", "p90", "p99", "max")
    ]
    rows.add_row(name, f"{summary.n:,}", *cells, seconds(summary.mean))


def _print_highlights(out: Console, highlights: dict[str, Any]) -> None:
    distributions = {name: value for name, value in highlights.items() if isinstance(value, Summary)}
    if distributions:
        rows = table("this load", "n", "p50", "p90", "p99", "max", "mean")
        for name, summary in distributions.items():
            _add(rows, name.replace("_", " "), summary)
        out.print(rows)
    numbers = {name: value for name, value in highlights.items() if isinstance(value, float)}
    if numbers:
        out.print(", ".join(f"{name.replace('_', ' ')} {value:,.2f}" for name, value in numbers.items()))


def print_capacity(document: dict[str, Any]) -> None:
    """The rate found and what was seen on the way."""
    out = console()
    rows = table("rate", "attainment of each run", "verdict")
    for trial in document["trials"]:
        shares = ", ".join(f"{share:.1%}" for share in trial["attainment"])
        verdict = ("holds" if trial["holds"] else "misses") + ("" if trial["valid"] else " (invalid run)")
        rows.add_row(f"{trial['rate']:.3g}/s", shares, verdict)
    out.print(rows)
    slo = ", ".join(f"{name} {seconds(bound)}" for name, bound in document["slo"].items())
    if document["capacity"] is None:
        out.print(f"no rate tried keeps {slo} for {document['attain']:.1%} of requests")
        return
    missed = f", missed at {document['missed_at']:.3g}/s" if document["missed_at"] is not None else ""
    out.print(f"[bold]{document['capacity']:.3g} requests/s[/bold] keep {slo} for {document['attain']:.1%}{missed}")


def print_sweep(document: dict[str, Any]) -> None:
    """One line a run."""
    out = console()
    rows = table(
        "rate", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "output tokens/s", "goodput", "attainment", "valid"
    )
    for point in document["sweep"]:
        for run in point["runs"]:
            rows.add_row(
                f"{point['rate']:.3g}/s",
                *(seconds(v) for v in (run["ttft"].p50, run["ttft"].p99, run["itl"].p50, run["itl"].p99)),
                f"{run['output_tokens_per_second']:,.1f}",
                f"{run['goodput']:.3g}",
                f"{run['attainment']:.1%}" if run["attainment"] is not None else "",
                "yes" if run["valid"] else "no",
            )
    out.print(rows)


def print_comparison(document: dict[str, Any]) -> None:
    """Each run against the first: below 1 is less time, or less throughput."""
    out = console()
    for comparison in document["comparisons"]:
        out.print(
            f"{comparison['workload']}: [bold]{escape(comparison['other'])}[/bold] against "
            f"{escape(comparison['base'])}: {pairing(comparison)}"
        )
        if not comparison["valid"]:
            out.print("[bold red]at least one of the runs is invalid[/bold red]")
        rows = table("", "n", "base", "other", "ratio", "95 % interval")
        for row in ratio_rows(comparison):
            rows.add_row(*ratio_cells(row))
        out.print(rows)
