"""How a ledger looks in a terminal: sentences, a bar with one colour a cause, then the numbers."""

from __future__ import annotations

import time

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from pellucid.cli.trace_view import console, table
from pellucid.core.ledger import CAUSES, Causes
from pellucid.telemetry.explanation import Aggregate, Language, meaning
from pellucid.telemetry.store import StoredRequest

_WIDTH = 72
_COLOURS = {
    "tokenize": "grey62",
    "grammar": "grey62",
    "queue": "dark_orange",
    "prefill": "blue",
    "decode": "green",
    "preempted": "red",
    "engine": "magenta",
    "deliver": "cyan",
    "client": "yellow",
}
_SHADES = "█▓▒░▞▚"
_TITLES = {
    "en": {"first": "to the first token", "all": "to the last byte", "requests": "all requests"},
    "zh": {"first": "到首个 token", "all": "到最后一个字节", "requests": "全部请求"},
}


def print_request(request: StoredRequest, sentences: list[str], language: Language) -> None:
    """One request: what happened in words, two bars, the table of causes."""
    out, ledger, titles = console(), request.ledger, _TITLES[language]
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(request.finished_at))
    tenant = f", {escape(request.tenant)}" if request.tenant else ""
    out.print(f"[bold]{escape(request.id)}[/bold]{tenant}, {when}, {request.reason}")
    for sentence in sentences:
        out.print(Padding(escape(sentence), (0, 0, 0, 2)), soft_wrap=False)
    longest = ledger.e2e_seconds
    if ledger.first_token_seconds is not None:
        _print_bar(out, titles["first"], ledger.first_token_causes, ledger.first_token_seconds, longest)
    _print_bar(out, titles["all"], ledger.causes, ledger.e2e_seconds, longest)
    _print_causes(out, ledger.causes, ledger.e2e_seconds, language, dict(ledger.first_token_causes))
    out.print()


def print_aggregate(total: Aggregate, sentences: list[str], language: Language) -> None:
    """All requests together."""
    out = console()
    for sentence in sentences:
        out.print(escape(sentence))
    if total.num_requests:
        _print_bar(out, _TITLES[language]["requests"], total.causes, total.waited_seconds, total.waited_seconds)
        _print_causes(out, total.causes, total.waited_seconds, language)


def _print_bar(out: Console, title: str, causes: Causes, seconds: float, longest: float) -> None:
    """A bar whose length is `seconds` on a scale that ends at `longest`. Each cause is rounded so that all add up."""
    bar = Text("  ")
    width = _WIDTH * seconds / longest if longest > 0.0 else 0.0
    done, drawn = 0.0, 0
    for name, part in causes:
        done += part
        until = round(width * done / seconds) if seconds > 0.0 else 0
        bar.append(_shade(name) * (until - drawn), style=_colour(name))
        drawn = until
    bar.append(f" {_number(seconds)} {title}", style="dim")
    out.print(bar)


def _print_causes(
    out: Console, causes: Causes, total: float, language: Language, first: dict[str, float] | None = None
) -> None:
    rows = table("", "", "s", "%", *(("s, 1st",) if first else ()), "")
    for name, seconds in sorted(causes, key=lambda pair: -pair[1]):
        cells = [f"{seconds:.4f}", f"{100 * seconds / total:.1f}" if total > 0.0 else ""]
        if first:
            cells.append(f"{first[name]:.4f}" if name in first else "")
        rows.add_row(Text(_shade(name), style=_colour(name)), name, *cells, Text(meaning(name, language), style="dim"))
    for column, justify in ((1, "left"), (-1, "left")):
        rows.columns[column].justify = justify  # type: ignore[assignment]
    out.print(Padding(rows, (0, 0, 0, 2)))


def _number(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1.0 else f"{1e3 * seconds:.3g} ms"


def _colour(name: str) -> str:
    return _COLOURS[name.partition(".")[0]]


def _shade(name: str) -> str:
    """Causes of one family share a colour and differ by their pattern."""
    family = [other for other in CAUSES if other.partition(".")[0] == name.partition(".")[0]]
    return _SHADES[family.index(name) % len(_SHADES)]
