"""One HTML file that needs nothing else: figures, numbers and how they were got, readable without a network.

plotly's script is written into the page once. All text that comes from files or servers is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pellucid.core.errors import PellucidError
from pellucid.workload.compare import RatioRow, Run, by_workload, pairing, ratio_rows
from pellucid.workload.figures import analysis_figures, comparison_figures, plotly_script, run_figures
from pellucid.workload.metrics import Clocking, RequestRecord, Summary

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem .2rem 0; text-align: right; }
td:first-child, th:first-child { text-align: left; } th { font-weight: 500; opacity: .7; }
.headline { display: flex; gap: 2.5rem; flex-wrap: wrap; } .headline b { display: block; font-size: 1.6rem; }
.bad { color: #b91c1c; font-weight: 600; } .figure { background: #fff; border-radius: 6px; margin: 1rem 0; }
.note { opacity: .7; font-size: .9rem; }
summary { cursor: pointer; font-size: 1.1rem; font-weight: 600; margin-top: 2rem; }
pre { overflow-x: auto; white-space: pre-wrap; font-size: 12px; opacity: .85; }
"""

_DISTRIBUTIONS = (
    ("ttft", "TTFT"),
    ("itl", "ITL (per token)"),
    ("icl", "ICL (per chunk)"),
    ("tpot", "TPOT (per request)"),
    ("stall", "worst gap of a request"),
    ("e2e", "E2E"),
    ("send_lag", "send lag (client)"),
)


_FIGURE = {"displaylogo": False, "responsive": True}


def write_analysis(path: Path, document: dict[str, Any], figures: dict[str, Any]) -> None:
    """The page of `trace analyze`. Raises PellucidError where plotly is absent or the path cannot be written."""
    made = analysis_figures(document, figures)
    _write(path, f"Trace {document['trace']}", _analysis_head(document), made, document)


def _analysis_head(document: dict[str, Any]) -> str:
    lengths, reuse = document["lengths"], document["prefix"]
    facts = [
        ("requests", f"{document['num_requests']:,}"),
        ("input tokens p50 / p99", f"{lengths['input']['p50']:,.0f} / {lengths['input']['p99']:,.0f}"),
        ("output tokens p50 / p99", f"{lengths['output']['p50']:,.0f} / {lengths['output']['p99']:,.0f}"),
    ]
    if reuse["curve"]:
        facts.append(("tokens shared, no memory limit", f"{reuse['token_hit_infinite']:.1%}"))
    if "num_devices" in document:
        facts.append((f"least {document['hardware']} for {document['model']}", f"{document['num_devices']:,}"))
    return _headline(facts)


def write_run(path: Path, document: dict[str, Any], records: Sequence[RequestRecord]) -> None:
    """The page of one load run."""
    made = run_figures(records, Clocking(document["loop"] == "open"))
    target = document["target"]
    _write(path, f"{document['workload']} on {target['model']} at {target['url']}", _run_head(document), made, document)


def _run_head(document: dict[str, Any]) -> str:
    verdict = "".join(f'<p class="bad">invalid: {html.escape(reason)}</p>' for reason in document["invalid_because"])
    for status, failure in document["failures"].items():
        told = f"{failure['num_requests']:,} failed ({status}), such as: {failure['example']}"
        verdict += f'<p class="bad">{html.escape(told)}</p>'
    golden = (
        ("TTFT p50 / p99", _pair(document["ttft"])),
        ("ITL p50 / p99", _pair(document["itl"])),
        ("TPOT p50 / p99", _pair(document["tpot"])),
        ("output tokens/s", f"{document['output_tokens_per_second']:,.1f}"),
        ("goodput, requests/s", f"{document['goodput']:,.3g} ({document['attainment'] or 0:.1%} of offered)"),
    )
    highlights = {name.replace("_", " "): value for name, value in document["highlights"].items()}
    tables = (
        _table("Distributions", [(name, document[key]) for key, name in _DISTRIBUTIONS]),
        _table("What this load is for", [item for item in highlights.items() if isinstance(item[1], Summary)]),
    )
    numbers = (f"{name}: {value:,.2f}" for name, value in highlights.items() if isinstance(value, float))
    return verdict + _headline(golden) + "".join(tables) + "".join(f"<p>{html.escape(text)}</p>" for text in numbers)


def write_comparison(path: Path, runs: Sequence[Run], comparisons: Sequence[dict[str, Any]]) -> None:
    """The page of `pellucid report`: for each load the golden numbers of its runs side by side, the ratios to the
    first, and the runs' distributions in one figure."""
    parts = []
    for workload, group in by_workload(runs).items():
        parts.append(f"<h2>{html.escape(workload)}</h2>")
        parts.append(_golden_table(group))
        parts += [_ratio_table(c, group[0].label) for c in comparisons if c["workload"] == workload]
        parts.append(_embedded(comparison_figures([(run.label, run.records) for run in group], _clocking(group[0]))))
    labels = dict.fromkeys(run.label for run in runs)
    head = _glance(comparisons)
    document = {"comparisons": list(comparisons)}
    _write_page(path, " against ".join(reversed(labels)), head + "".join(parts), document)


# Of a comparison, what stands at the top of the page: (title, figure, percentile or None).
_AT_A_GLANCE = (
    ("TTFT p50", "ttft", "p50"),
    ("TPOT p50", "tpot", "p50"),
    ("worst gap p50", "stall", "p50"),
    ("output tokens/s", "output_tokens_per_second", None),
)


def _glance(comparisons: Sequence[dict[str, Any]]) -> str:
    """One line a comparison: the ratios of the golden numbers."""
    rows = []
    for comparison in comparisons:
        found = (_of(comparison["ratios"][name], key).get("ratio") for _, name, key in _AT_A_GLANCE)
        cells = ("" if ratio is None else f"{ratio:.2f}" for ratio in found)
        rows.append(_cells("td", (comparison["workload"], _label(comparison, "other"), *cells)))
    heads = _cells("th", ("ratio to the first run", "", *(title for title, _, _ in _AT_A_GLANCE)))
    note = "Below 1 is less time, or less throughput, than the first run of the load."
    return f'<table>{heads}{"".join(rows)}</table><p class="note">{note}</p>'


def _of(found: dict[str, Any], key: str | None) -> dict[str, Any]:
    return found if key is None else found.get(key, {})


def _label(comparison: dict[str, Any], side: str) -> str:
    return Path(comparison[side]).stem.removesuffix(f"-{comparison['workload']}")


def _clocking(run: Run) -> Clocking:
    return Clocking(run.document["loop"] == "open")


def _golden_table(runs: Sequence[Run]) -> str:
    heads = ("run", "TTFT p50 / p99", "ITL p50 / p99", "TPOT p50 / p99", "output tokens/s", "goodput, requests/s", "n")
    rows, notes = [], []
    for run in runs:
        document = run.document
        pairs = (_golden(document[key]) for key in ("ttft", "itl", "tpot"))
        numbers = (f"{document['output_tokens_per_second']:,.1f}", f"{document['goodput']:,.3g}")
        rows.append(_cells("td", (run.label, *pairs, *numbers, f"{document['num_requests']:,}")))
        target = document["target"]
        notes.append(f'<p class="note">{html.escape(run.label)}: {html.escape(target["model"])} at ')
        notes.append(f"{html.escape(target['url'])}, {html.escape(document.get('started_at', ''))}</p>")
        notes += (
            f'<p class="bad">{html.escape(run.label)} is invalid: {html.escape(reason)}</p>'
            for reason in document["invalid_because"]
        )
    notes.append('<p class="note">* too few values behind this percentile</p>')
    return f"<table>{_cells('th', heads)}{''.join(rows)}</table>{''.join(notes)}"


def _golden(summary: dict[str, Any]) -> str:
    """p50 / p99 of a summary read back from its file, starred where too few values stand behind the second."""
    mark = "*" if "p99" in summary.get("low_n", ()) else ""
    return f"{seconds(summary.get('p50'))} / {seconds(summary.get('p99'))}{mark}"


def _ratio_table(comparison: dict[str, Any], base: str) -> str:
    other = _label(comparison, "other")
    heads = _cells("th", ("", "n", base, other, "ratio", "95 % interval"))
    rows = "".join(_cells("td", ratio_cells(row)) for row in ratio_rows(comparison))
    return f"<h3>{html.escape(f'{other} against {base}: {pairing(comparison)}')}</h3><table>{heads}{rows}</table>"


def _cells(tag: str, texts: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts) + "</tr>"


def _headline(facts: Iterable[tuple[str, str]]) -> str:
    cells = "".join(f"<div>{html.escape(name)}<b>{html.escape(value)}</b></div>" for name, value in facts)
    return f'<div class="headline">{cells}</div>'


def _table(title: str, distributions: Sequence[tuple[str, Summary]]) -> str:
    """The distributions that have values, with a note where a percentile has too few of them."""
    rows = "".join(_distribution_row(name, summary) for name, summary in distributions if summary.n)
    if not rows:
        return ""
    heads = _cells("th", ("", "n", "p50", "p90", "p99", "max", "mean"))
    low = any(summary.low_n for _, summary in distributions)
    note = '<p class="note">* too few values behind this percentile</p>' if low else ""
    return f"<h2>{title}</h2><table>{heads}{rows}</table>{note}"


def _pair(summary: Summary) -> str:
    if summary.p50 is None or summary.p99 is None:
        return "none"
    mark = " (low n)" if "p99" in summary.low_n else ""
    return f"{seconds(summary.p50)} / {seconds(summary.p99)}{mark}"


def seconds(value: float | None) -> str:
    """A duration for people."""
    if value is None:
        return "none"
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.1f} ms"


def ratio_cells(row: RatioRow) -> tuple[str, ...]:
    """A comparison's row for people: name, n, both sides, ratio, interval."""
    base, other = (_side(value, row.in_seconds) for value in (row.base, row.other))
    ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
    interval = "" if row.low is None else f"{row.low:.3f} to {row.high:.3f}"
    return row.name, "" if row.n is None else f"{row.n:,}", base, other, ratio, interval


def _side(value: float | None, in_seconds: bool) -> str:
    if value is None:
        return ""
    return seconds(value) if in_seconds else f"{value:,.4g}"


def _distribution_row(name: str, summary: Summary) -> str:
    marks = {key: " *" if key in summary.low_n else "" for key in ("p90", "p99")}
    cells = [name, f"{summary.n:,}"]
    cells += [seconds(getattr(summary, key)) + marks.get(key, "") for key in ("p50", "p90", "p99", "max", "mean")]
    return _cells("td", cells)


def _write(path: Path, title: str, head: str, figures: Sequence[Any], document: dict[str, Any]) -> None:
    _write_page(path, title, f"{head}<h2>Figures</h2>{_embedded(figures)}", document)


def _embedded(figures: Sequence[Any]) -> str:
    parts = (figure.to_html(full_html=False, include_plotlyjs=False, config=_FIGURE) for figure in figures)
    return "".join(f'<div class="figure">{part}</div>' for part in parts)


def _write_page(path: Path, title: str, body: str, document: dict[str, Any]) -> None:
    numbers = msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style><script>{plotly_script()}</script></head>"
        f"<body><h1>{html.escape(title)}</h1>{body}"
        f"<details><summary>All numbers</summary><pre>{html.escape(numbers)}</pre></details></body></html>"
    )
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise PellucidError(f"{path}: cannot be written ({error.strerror})") from None
