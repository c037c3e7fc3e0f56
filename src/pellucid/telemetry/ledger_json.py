"""A ledger as JSON: one shape for replies, `GET /v1/requests/{id}/ledger` and `pellucid explain --json`."""

from __future__ import annotations

from typing import Any

from pellucid.core.ledger import LedgerReport, Miss


def reply_fields(report: LedgerReport) -> dict[str, Any]:
    """What `"include_ledger": true` adds to a reply. Seconds; causes without time are left out; `first_token` is null
    where there was none."""
    first = None
    if report.first_token_seconds is not None:
        first = {"e2e_seconds": report.first_token_seconds, "causes": dict(report.first_token_causes)}
    return {
        "e2e_seconds": report.e2e_seconds,
        "causes": dict(report.causes),
        "first_token": first,
        "tokens": report.tokens._asdict(),
        "floor_seconds": report.floors._asdict(),
    }


def all_fields(report: LedgerReport) -> dict[str, Any]:
    """The whole ledger: the fields of a reply, then phases, steps, misses and who held it up."""
    return reply_fields(report) | {
        "phases": [phase._asdict() | {"causes": dict(phase.causes)} for phase in report.phases],
        "num_steps": report.num_steps,
        "num_preemptions": report.num_preemptions,
        "misses": [_miss(miss) for miss in report.misses],
        "blockers": [blocker._asdict() for blocker in report.blockers],
        "first_token_blockers": [blocker._asdict() for blocker in report.first_blockers],
    }


def _miss(miss: Miss) -> dict[str, Any]:
    """With `texts` ([the prompt's, the cached one's]) only where they are known; tokens are the server's business."""
    fields = miss._asdict()
    del fields["there"]
    if miss.texts is None:
        del fields["texts"]
    return fields
