"""`pellucid steps`: what the engine did lately, step by step, from a running server or from a dump of its recorder."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pellucid.core.errors import ConfigError
from pellucid.telemetry.perfetto import trace
from pellucid.telemetry.recorder import DUMP_FORMAT

Rows = list[dict[str, Any]]
_TIMEOUT_SECONDS = 30.0
_UNBOUNDED = 100_000


def steps(
    dump: Annotated[
        Path | None, typer.Argument(metavar="[DUMP]", help="Read this file of the recorder instead of asking a server.")
    ] = None,
    url: Annotated[str, typer.Option(help="The server.", envvar="PELLUCID_URL")] = "http://127.0.0.1:8000",
    last: Annotated[int, typer.Option(help="How many steps.", min=1)] = 20,
    api_key: Annotated[
        str | None, typer.Option(help="The operator's key, where keys are configured.", envvar="PELLUCID_API_KEY")
    ] = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="Write a trace to this file, for ui.perfetto.dev or Chrome's about:tracing.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the steps as one JSON document.")] = False,
) -> None:
    """Show the last steps: predicted and measured time, what was computed, for whom, and what was decided."""
    reason, rows = ("", _ask(url, last, api_key)) if dump is None else _read(dump, last)
    if perfetto is not None:
        _write(perfetto, trace(rows))
        typer.echo(f"wrote {len(rows)} steps to {perfetto}", err=True)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    elif perfetto is None:
        if reason:
            typer.echo(f"dumped because: {reason}", err=True)
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = _UNBOUNDED  # a file or a pipe takes lines of any length
        console.print(table(rows))


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """One line a step; times in milliseconds."""
    shown = Table(box=None, padding=(0, 1), header_style="bold")
    for name in ("step", "ms", "expected", "stolen", "gap", "tokens", "prompt", "seqs", "wait", "free", "cached"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("plan", no_wrap=True, overflow="ellipsis")
    for row in rows:
        features, blocks = row["features"], row["blocks"]["device"]
        late = row["seconds"] > row["predicted_seconds"] + 3 * row["predicted_spread"]
        shown.add_row(
            str(row["step_id"]),
            f"{1e3 * row['seconds']:.1f}",
            f"{1e3 * row['predicted_seconds']:.1f}",
            f"{1e3 * row.get('stolen_seconds', 0.0):.1f}",  # dumps of earlier versions have none
            f"{1e3 * row['gap_seconds']:.1f}",
            str(features["num_tokens"]),
            str(row["num_prompt_tokens"]),
            str(features["num_sequences"]),
            str(row["num_waiting"]),
            str(blocks["free"]),
            str(blocks["cached"]),
            row["plan"].partition(" | ")[2],
            style="red" if row["num_preempted"] else "yellow" if late else None,
        )
    return shown


def _ask(url: str, last: int, api_key: str | None) -> Rows:
    """The rows of `GET /v1/steps`. Raises ConfigError with what the server said, or why it could not be asked."""
    request = urllib.request.Request(f"{url.rstrip('/')}/v1/steps?last={last}")
    if api_key is not None:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as reply:
            rows: Rows = json.load(reply)["data"]
            return rows
    except urllib.error.HTTPError as error:
        raise ConfigError(f"{url}: {_message(error)}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(f"{url} did not answer with steps ({reason}); is `pellucid serve` there? (--url)") from None


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.code} {error.reason}"


def _read(path: Path, last: int) -> tuple[str, Rows]:
    """Why a dump was written, and its last rows. Raises ConfigError for a file that is none."""
    try:
        head, *rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if head["pellucid_steps"] != DUMP_FORMAT:
            raise ConfigError(f"{path}: a dump of format {head['pellucid_steps']}; this version reads {DUMP_FORMAT}")
        return str(head["reason"]), rows[-last:]
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path}: not a dump of the step recorder (JSON lines under a line that says why)") from None


def _write(path: Path, document: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(document), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None
