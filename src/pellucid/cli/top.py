"""`pellucid top`: the ops page's first screen in a terminal, from the same stream.

What is drawn is one tick and the history of those before it; `--once` prints it and leaves.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pellucid.core.errors import PellucidError
from pellucid.server.ops.document import Blocks, Hello, Percentiles, Tick
from pellucid.workload.report import seconds

_BARS = "▁▂▃▄▅▆▇█"
_BEFORE_RETRY = 2.0
_ANSWER_SECONDS = 30.0  # a stream that is silent for so long has broken off
_HISTORY = 60
_PIPE_WIDTH = 100
_POOL = (("active", "green", "█"), ("in_flight", "magenta", "▚"), ("cached", "cyan", "▒"), ("free", "dim", "░"))


class Lost(PellucidError):
    """The stream cannot be had, or has broken off."""


class Point(NamedTuple):
    """What is kept of a tick for the lines."""

    output: float
    prompt: float
    step: float | None


def top(
    url: Annotated[str, typer.Argument(help="The server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(envvar="PELLUCID_API_KEY", show_envvar=False, help="The operator's key.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one screen and leave.")] = False,
) -> None:
    """Watch a server: tokens, requests, latency, steps, memory, tenants, once a second."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPE_WIDTH)
    history: deque[Point] = deque(maxlen=_HISTORY)
    if once:
        hello, ticks = watch(url, api_key)
        next(ticks)  # has nothing before it to take rates from
        console.print(screen(hello, next(ticks), history))
        return
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            try:
                hello, ticks = watch(url, api_key)
                for tick in ticks:
                    live.update(screen(hello, tick, history), refresh=True)
            except Lost as error:
                if not history:
                    raise
                live.update(Text(f"{error}; trying again", style="yellow"), refresh=True)
            except KeyboardInterrupt:
                return
            time.sleep(_BEFORE_RETRY)


def watch(url: str, api_key: str | None) -> tuple[Hello, Iterator[Tick]]:
    """The stream's first document, and those that follow. Raises Lost, at once or while they are read."""
    events = _events(url, api_key)
    _, data = next(events)
    return msgspec.json.decode(data, type=Hello), (msgspec.json.decode(data, type=Tick) for _, data in events)


def _events(url: str, api_key: str | None) -> Iterator[tuple[bytes, bytes]]:
    """(name, data) of the stream's events. Raises Lost when it ends, as it has no end of its own."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(url.rstrip("/") + "/v1/live", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as reply:
            name = b""
            for line in reply:
                if line.startswith(b"event: "):
                    name = line[7:].strip()
                elif name and line.startswith(b"data: "):
                    yield name, line[6:]
                    name = b""
    except urllib.error.HTTPError as error:
        raise Lost(_refusal(url, error)) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise Lost(f"{url}: {getattr(error, 'reason', error)}") from None
    raise Lost(f"{url}: the server ended the stream")


def screen(hello: Hello, tick: Tick, history: deque[Point]) -> RenderableType:
    """One screen, and the tick added to the history."""
    inside = tick.inside
    history.append(Point(tick.rates.output, tick.rates.prompt + tick.rates.cached, tick.steps.median))
    parts: list[RenderableType] = [_head(hello, tick), _figures(hello, tick, history)]
    if inside is not None:
        parts += [_pool(hello, inside.blocks), _tenants(tick)]
    return Group(*parts)


def _refusal(url: str, error: urllib.error.HTTPError) -> str:
    try:
        message = json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = error.reason
    if error.code == 404:
        return f"{url} has no live stream: it is no Pellucid server, or was started with --ops-page off"
    hint = "; pass --api-key" if error.code in (401, 403) else ""
    return f"{url}: {message}{hint}"


def _head(hello: Hello, tick: Tick) -> Text:
    text = Text.assemble((hello.model, "bold"), f"  Pellucid {hello.version}  ")
    if tick.state == "ready":
        text.append("live", "green")
    else:
        text.append(f"{tick.state}: {tick.reason}", "red")
    if tick.late:
        text.append(f"  {tick.late:.1f} s into one step", "yellow")
    return text


def _figures(hello: Hello, tick: Tick, history: Sequence[Point]) -> Table:
    rates = tick.rates
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    output, prompt = [point.output for point in history], [point.prompt for point in history]
    table.add_row("output tokens/s", _bold(f"{rates.output:,.0f}"), line(output))
    cached = f"{rates.cached:,.0f} from the cache"
    table.add_row("prompt tokens/s", _bold(f"{rates.prompt + rates.cached:,.0f}"), Text(f"{line(prompt)}  {cached}"))
    table.add_row("running", _bold(f"{tick.running:,}"), f"of at most {hello.max_running:,}")
    inside = tick.inside
    reasons = "" if inside is None else ", ".join(f"{number:,} {cause}" for cause, number in inside.waiting.items())
    table.add_row("waiting", _bold(f"{tick.waiting:,}"), Text(reasons))
    if inside is not None:
        table.add_row("swapped", _bold(f"{inside.swapped:,}"), "")
    table.add_row("step time", *_step_time(hello, tick, history))
    table.add_row("time to first token", *_percentiles(tick.ttft))
    table.add_row("time between tokens", *_percentiles(tick.itl))
    return table


def _step_time(hello: Hello, tick: Tick, history: Sequence[Point]) -> tuple[Text, Text]:
    steps = tick.steps
    facts = (("expected", steps.predicted), ("longest", steps.longest), ("target", hello.step_target))
    told = "  ".join(f"{name} {seconds(value)}" for name, value in facts if value is not None)
    median = "idle" if steps.median is None else seconds(steps.median)
    return _bold(median), Text(f"{line([point.step for point in history])}  {told}")


def _percentiles(values: Percentiles) -> tuple[Text, str]:
    if not values.count:
        return _bold("none"), "in the last minute"
    tail = f"p50, p90 {seconds(values.p90)}, p99 {seconds(values.p99)}, of {values.count:,} in the last minute"
    return _bold(seconds(values.p50)), tail


def _pool(hello: Hello, blocks: Blocks) -> Text:
    text = Text(f"\nKV pool, {blocks.total:,} blocks of {hello.block_size}\n")
    width = 80
    left = width
    for name, style, mark in _POOL:
        share = left if name == "free" else min(left, round(width * getattr(blocks, name) / blocks.total))
        text.append(mark * share, style)
        left -= share
    text.append("\n")
    for name, style, mark in _POOL:
        text.append(f"{mark} ", style)
        number = getattr(blocks, name)
        text.append(f"{name.replace('_', ' ')} {number:,} ({number / blocks.total:.0%})   ")
    return text


def _tenants(tick: Tick) -> RenderableType:
    assert tick.inside is not None
    tenants = [tenant for tenant in tick.inside.tenants if tenant.running or tenant.waiting]
    if len(tenants) < 2:
        return Text()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("tenant", "weight", "running", "waiting", "blocks", "ahead by"):
        table.add_column(heading, justify="left" if heading == "tenant" else "right")
    for tenant in tenants:
        waiting = sum(tenant.waiting.values())
        cells = (f"{tenant.running:,}", f"{waiting:,}", f"{tenant.blocks:,}", f"{tenant.lead:,.0f}")
        table.add_row(Text(tenant.name or "default"), f"{tenant.weight:g}", *cells)
    return Group(Text(), table)


def line(values: Sequence[float | None]) -> str:
    """The values as a row of bars; a blank where there is none."""
    top = max((value for value in values if value is not None), default=0.0) or 1.0
    return "".join(" " if value is None else _BARS[min(7, int(8 * value / top))] for value in values)


def _bold(text: str) -> Text:
    return Text(text, "bold")
