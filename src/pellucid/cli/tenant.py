"""`pellucid tenant ...`: make tenants and keys, and say what was used. A key is printed once, alone, on stdout."""

from __future__ import annotations

import csv
import json
import os
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pellucid.cli.options import flag, flag_options
from pellucid.cli.progress import stderr
from pellucid.core.errors import ConfigError
from pellucid.core.tenants import Tenant
from pellucid.planner.profile import state_directory
from pellucid.server.tenants import TenantEntry, add_operator, add_tenant, new_key, read_tenants
from pellucid.server.usage import COLUMNS, FILE_NAME, read_usage

app = typer.Typer(no_args_is_help=True, help="Make tenants and their keys, and say what they used.")

TenantsOption = Annotated[
    Path, typer.Option("--tenants", metavar="FILE", help="The tenants file.", envvar="PELLUCID_TENANTS")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document.")]
DEFAULT_FILE = Path("tenants.toml")
_DEFAULTS = Tenant("default")


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a tenant, as `Tenant` has them."""

    weight: float = flag(_DEFAULTS.weight, "Share of the service relative to the others.")
    priority_ceiling: int | None = flag(None, "Lowest priority number, the most urgent one, that it may ask for.")
    max_running: int | None = flag(None, "Most requests computed at once.")
    max_waiting: int | None = flag(None, "Most requests queued at once.")
    tokens_per_minute: int | None = flag(None, "Uncached prompt tokens and output tokens.")
    kv_share: float = flag(_DEFAULTS.kv_share, "Part of the KV pool, above 0 and up to 1.")


@app.command()
@flag_options(Limits)
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Letters, digits, - and _.")],
    tenants: TenantsOption = DEFAULT_FILE,
    public_prefix: Annotated[
        list[str] | None, typer.Option(help="Name of a public prefix that it shares; may be given several times.")
    ] = None,
    *,
    limits: Limits,
) -> None:
    """Add tenant NAME to the file and print its key, which is kept nowhere."""
    made = new_key()
    add_tenant(tenants, TenantEntry(Tenant(name, **asdict(limits)), (made.digest,), tuple(public_prefix or ())))
    print(made.key)
    _say(f"{tenants} has tenant {name} now. The line above is its key; it is kept nowhere, only its hash is.")


@app.command()
def operator(tenants: TenantsOption = DEFAULT_FILE) -> None:
    """Add the operator to the file and print the key, which opens what shows all tenants and is kept nowhere."""
    made = new_key()
    add_operator(tenants, made.digest)
    print(made.key)
    _say(f"{tenants} has an operator now. The line above is the key; it is kept nowhere, only its hash is.")


@app.command()
def key() -> None:
    """Print a new key for a tenant that is there already, and on stderr the hash to add to its `keys`."""
    made = new_key()
    print(made.key)
    _say(f'To have it accepted, add to the `keys` of its owner: "{made.hash}"')


@app.command("list")
def list_tenants(tenants: TenantsOption = DEFAULT_FILE, as_json: AsJson = False) -> None:
    """Show the tenants of the file and their limits."""
    rows = [_row(entry) for entry in read_tenants(tenants).entries]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table("tenant", "keys", "weight", "priority", "running", "waiting", "tokens/min", "KV share", "shares")
    for row in rows:
        table.add_row(*("" if value is None else _text(value) for value in row.values()))
    Console().print(table)


@app.command()
def usage(
    day: Annotated[str | None, typer.Option(metavar="YYYY-MM-DD", help="One day (UTC) instead of all.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Comma-separated values with a header.")] = False,
    as_json: AsJson = False,
) -> None:
    """Tokens used per tenant and day, as servers of this user have counted them."""
    if day is not None and not re.fullmatch(r"\d{4}-\d\d-\d\d", day):
        raise ConfigError(f"--day is {day!r}; it must be a date such as 2026-01-31")
    rows = read_usage(state_directory(os.environ) / FILE_NAME, day)
    if as_csv:
        csv.writer(sys.stdout, lineterminator="\n").writerows([COLUMNS, *rows])
    elif as_json:
        print(json.dumps([row._asdict() for row in rows], indent=2))
    else:
        table = Table(*COLUMNS)
        for row in rows:
            table.add_row(*map(_text, row))
        Console().print(table)


def _row(entry: TenantEntry) -> dict[str, object]:
    limits = asdict(entry.tenant)
    return {"name": limits.pop("name"), "keys": len(entry.keys), **limits, "public_prefixes": entry.public_prefixes}


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def _say(text: str) -> None:
    stderr.print(text, soft_wrap=True, markup=False)
