"""`pellucid explain`: why a request took as long as it did, from the store of a server that runs or has run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from pellucid.cli.explain_view import print_aggregate, print_request
from pellucid.core.errors import PellucidError
from pellucid.planner.profile import state_directory
from pellucid.planner.quantity import parse_seconds
from pellucid.telemetry.explanation import Language, aggregate, explain, explain_aggregate
from pellucid.telemetry.ledger_json import all_fields
from pellucid.telemetry.store import StoredRequest, StoreReader


def explain_requests(
    request_id: Annotated[
        str | None, typer.Argument(metavar="ID", help="A request (the X-Request-Id of its reply); or its beginning.")
    ] = None,
    slowest: Annotated[int | None, typer.Option(min=1, help="The N requests that took longest.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only requests of this tenant.")] = None,
    since: Annotated[str | None, typer.Option(help="Only what ended in the last 10m, 2h, 90s, ...")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of words and bars.")] = False,
    lang: Annotated[Language | None, typer.Option(help="Language of the words; by default that of the locale.")] = None,
    store: Annotated[Path | None, typer.Option(help="The file that `pellucid serve --store` wrote.")] = None,
) -> None:
    """Say where the time of a request went, or of all of them together. Works when the server is gone."""
    if request_id is not None and (slowest is not None or tenant is not None or since is not None):
        raise typer.BadParameter("an ID stands alone: leave out --slowest, --tenant and --since")
    language = lang or _language(os.environ)
    reader = StoreReader(store or default_store(os.environ))
    after = 0.0 if since is None else time.time() - _duration(since)
    if request_id is not None:
        _show(_found(reader, request_id), language, as_json=as_json, single=True)
    elif slowest is not None:
        _show(reader.slowest(slowest, tenant=tenant, since=after), language, as_json=as_json)
    else:
        total = aggregate(request.ledger for request in reader.all(tenant=tenant, since=after))
        sentences = explain_aggregate(total, language)
        if as_json:
            _print_json(_aggregate_fields(total, sentences))
        else:
            print_aggregate(total, sentences, language)


def default_store(environment: Mapping[str, str]) -> Path:
    """Where `pellucid serve` keeps ledgers unless told otherwise: `store.sqlite` in the state directory."""
    return state_directory(environment) / "store.sqlite"


def _found(reader: StoreReader, request_id: str) -> list[StoredRequest]:
    request = reader.get(request_id)
    if request is None:
        raise PellucidError(
            f"no request {request_id!r} is in the store, or several begin so; see `pellucid explain --slowest 10`"
        )
    return [request]


def _show(requests: list[StoredRequest], language: Language, *, as_json: bool, single: bool = False) -> None:
    if as_json:
        documents = [_request_fields(request, language) for request in requests]
        _print_json(documents[0] if single else documents)
        return
    for request in requests:
        print_request(request, explain(request.ledger, language), language)


def _request_fields(request: StoredRequest, language: Language) -> dict[str, Any]:
    return {
        "id": request.id,
        "tenant": request.tenant,
        "finished_at": request.finished_at,
        "reason": request.reason,
        "explanation": explain(request.ledger, language),
        "ledger": all_fields(request.ledger),
    }


def _aggregate_fields(total: Any, sentences: list[str]) -> dict[str, Any]:
    return {
        "num_requests": total.num_requests,
        "hit_rate": total.hit_rate,
        "prompt_tokens": total.prompt_tokens,
        "cached_tokens": total.cached_tokens,
        "output_tokens": total.output_tokens,
        "waited_seconds": total.waited_seconds,
        "removable_seconds": total.removable_seconds,
        "own_prefill_seconds": total.own_prefill_seconds,
        "causes": dict(total.causes),
        "explanation": sentences,
    }


def _print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False))


def _duration(text: str) -> float:
    """Seconds in "90s", "10m", "2h", "3d"; a bare number is seconds."""
    units = {"m": 60.0, "h": 3600.0, "d": 86_400.0}
    number, unit = text[:-1], text[-1:]
    try:
        if unit in units and not text.endswith("ms"):
            return float(number) * units[unit]
        return parse_seconds(text)
    except (ValueError, PellucidError):
        raise typer.BadParameter(f"--since {text}: expected a duration such as 90s, 10m, 2h or 3d") from None


def _language(environment: Mapping[str, str]) -> Language:
    """Chinese for a Chinese locale, else English."""
    locale = next((environment[name] for name in ("LC_ALL", "LC_MESSAGES", "LANG") if environment.get(name)), "")
    return "zh" if locale.lower().startswith("zh") else "en"
