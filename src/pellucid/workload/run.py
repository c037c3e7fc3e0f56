"""One measured run: warm up, send, judge the client itself, and put everything into one document.

The warm-up uses prompts that occur nowhere else. A run in which the client was the bottleneck is marked invalid, with
the reason: late sending, a processor used up, an event loop that slept too long.
"""

from __future__ import annotations

import asyncio
import gc
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from pellucid.workload.client import UNFINISHED, LoadClient, LoadItem
from pellucid.workload.compat import compat_columns
from pellucid.workload.drive import Health, HealthProbe, OnRecord
from pellucid.workload.metrics import SLO, RequestRecord, Summary, measure
from pellucid.workload.prompts import PromptMaker
from pellucid.workload.workloads import Workload

MAX_LAG_SHARE = 0.05
MIN_LAG_SECONDS = 0.005
MIN_LOOP_LAG_SECONDS = 0.01
MAX_CPU_SHARE = 0.9
WARMUP_STREAMS = 8
DOCUMENT_VERSION = 1


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a run is done. An empty `salt` draws a fresh one; `token_ids` (a pool) sends prompts as ids."""

    slo: SLO | None = None
    salt: str = ""
    token_ids: tuple[int, ...] | None = None
    warmup: bool = True
    compat: bool = False
    about: dict[str, Any] = {}


class RunResult(msgspec.Struct, frozen=True):
    """The summary document and the record of every measured request."""

    document: dict[str, Any]
    records: list[RequestRecord]


async def run_workload(
    client: LoadClient, workload: Workload, options: RunOptions, on_record: OnRecord = lambda record: None
) -> RunResult:
    """Do the run on an open client. Never raises for failing requests; they are in the records."""
    salt = options.salt or secrets.token_hex(4)
    prompts = PromptMaker(salt, options.token_ids)
    if options.warmup:
        await warm_up(client, prompts)
    connects_before = client.num_connects
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    gc.collect()
    gc.freeze()
    try:
        client.start_clock()
        async with HealthProbe() as probe:
            records = await workload.run(client, prompts, on_record)
    finally:
        gc.unfreeze()
    document = describe(records, workload, options.slo)
    reasons = verdict(document, probe.result, open_loop=workload.clocking.open_loop)
    document = {
        "pellucid_bench": DOCUMENT_VERSION,
        "workload": workload.name,
        "loop": "open" if workload.clocking.open_loop else "closed",
        "target": {"url": client.target.base, "model": client.target.model, "endpoint": client.target.endpoint},
        "started_at": started_at,
        "salt": salt,
        "schedule_sha256": workload.schedule_digest(),
        **options.about,
        "valid": not reasons,
        "invalid_because": reasons,
        **document,
        "client": {**probe.result._asdict(), "num_connects": client.num_connects - connects_before},
    }
    if options.compat:
        document["compat"] = compat_columns(records, options.slo)
    return RunResult(document, records)


async def warm_up(client: LoadClient, prompts: PromptMaker) -> None:
    """One request alone, then a few at once, which also opens connections. Failures here show again in the run."""
    first = await client.send(LoadItem(index=0, prompt=prompts.fresh("warm-up/0", 32), output_len=8))
    if first.status == UNFINISHED:
        raise asyncio.CancelledError
    items = [
        LoadItem(index=i, prompt=prompts.fresh(f"warm-up/{i}", 64), output_len=16) for i in range(1, 1 + WARMUP_STREAMS)
    ]
    await asyncio.gather(*map(client.send, items))


def describe(records: Sequence[RequestRecord], workload: Workload, slo: SLO | None) -> dict[str, Any]:
    """All measurements of a run, for the whole and by group and tenant where there are several."""
    window, clocking = workload.window(records), workload.clocking
    document = measure(records, clocking=clocking, window=window, slo=slo)
    if slo is not None:
        document["slo"] = {name: bound for name, bound in slo._asdict().items() if bound is not None}
    document["interrupted"] = any(record.status == UNFINISHED for record in records)
    document["highlights"] = workload.highlights(records)
    for field in ("group", "tenant"):
        names = sorted({getattr(record, field) for record in records})
        if len(names) > 1:
            document[f"{field}s"] = {
                name or "(none)": measure(
                    [r for r in records if getattr(r, field) == name], clocking=clocking, window=window, slo=slo
                )
                for name in names
            }
    return document


def verdict(document: dict[str, Any], health: Health, *, open_loop: bool) -> list[str]:
    """Why the run cannot be trusted; empty when it can.

    Lateness counts against the median TTFT (5 %), but a send never below 5 ms and the loop's sleep never below 10 ms:
    timers and a busy host are no finer.
    """
    reasons = []
    ttft: Summary = document["ttft"]
    allowed = max(MIN_LAG_SECONDS, MAX_LAG_SHARE * (ttft.p50 or 0.0))
    lag: Summary = document["send_lag"]
    if open_loop and lag.p99 is not None and lag.p99 > allowed:
        reasons.append(
            f"requests left late: p99 {1e3 * lag.p99:.1f} ms after their time, more than {1e3 * allowed:.1f} ms"
        )
    if health.cpu_share > MAX_CPU_SHARE:
        reasons.append(f"the client used {health.cpu_share:.0%} of a core: it, not the server, may be the limit")
    if health.loop_lag_p99 > max(allowed, MIN_LOOP_LAG_SECONDS):
        reasons.append(f"the client's event loop woke up to {1e3 * health.loop_lag_p99:.1f} ms late (p99)")
    if not document["num_requests"]:
        reasons.append("no request was measured")
    elif document["num_failed"] == document["num_requests"]:
        reasons.append("every request failed")
    if document["interrupted"]:
        reasons.append("the run was interrupted")
    return reasons
