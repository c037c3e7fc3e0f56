"""Ledgers for tests, without an engine."""

from __future__ import annotations

from typing import Any

from pellucid.core.ledger import Blocker, Floors, LedgerReport, Phase, TokenCounts
from pellucid.telemetry.store import StoredRequest

PLAIN_TOKENS = TokenCounts(1000, 0, 0, 0, 20)
PLAIN_FLOORS = Floors(0.3, 0.3, 0.005)


def report(
    queue: dict[str, float] | None = None,
    prefill: dict[str, float] | None = None,
    decode: dict[str, float] | None = None,
    deliver: dict[str, float] | None = None,
    *,
    tokens: TokenCounts = PLAIN_TOKENS,
    floors: Floors = PLAIN_FLOORS,
    **fields: Any,
) -> LedgerReport:
    """A ledger with these phases."""
    phases, start, first = [], 0.0, None
    for name, causes in (("queue", queue), ("prefill", prefill), ("decode", decode), ("deliver", deliver)):
        if name == "decode":
            first = start if causes is not None else None
        if causes is not None:
            end = start + sum(causes.values())
            phases.append(Phase(name, start, end, tuple(causes.items())))
            start = end
    return LedgerReport(start, tuple(phases), first, tokens, floors, **fields)


def stored(request_id: str, ledger: LedgerReport, *, tenant: str = "", at: float = 1e9, reason: str = "stop"):
    return StoredRequest(request_id, tenant, at, reason, ledger)


BEHIND_A_DOCUMENT = report(
    {"queue.step_in_flight": 0.412, "engine.gap": 0.001},
    {"prefill.own": 0.020, "prefill.wait": 0.547},
    {"decode.own": 0.1, "decode.batch": 0.02, "decode.stalled": 0.5},
    {"deliver": 0.002},
    tokens=TokenCounts(1500, 1488, 0, 0, 20),
    floors=Floors(0.12, 0.43, 0.005),
    blockers=(Blocker("cmpl-2", "acme", 6000, 1.4), Blocker("cmpl-3", "zeta", 900, 0.05)),
    first_blockers=(Blocker("cmpl-2", "acme", 6000, 0.9),),
)
WRITING = report(
    {"queue.step_in_flight": 0.004},
    {"prefill.own": 0.020},
    {"decode.own": 4.0, "decode.batch": 0.1},
    {"deliver": 0.002},
    tokens=TokenCounts(1500, 1425, 0, 0, 800),
    floors=Floors(3.9, 4.2, 0.0048),
    num_steps=801,
)
