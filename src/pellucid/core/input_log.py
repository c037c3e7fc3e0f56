"""Every call into the scheduler with its arguments: whatever a run decided can be decided again from this alone.

One JSON object per call. The recorder of steps, golden decision logs and the check that a simulator decides like the
server are views of this log. `replay` needs no executor: results are in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from pellucid.core.config import SchedulerConfig
from pellucid.core.cost import CostPrior
from pellucid.core.errors import RequestRejected
from pellucid.core.plan import StepPlan, StepResult
from pellucid.core.request import Request
from pellucid.core.tenants import Tenant

if TYPE_CHECKING:
    from pellucid.core.scheduler import Scheduler

FORMAT = 2


class InputLog:
    """Hands each call as a JSON-ready dict to `write`. What `write` does with it (a file, a list) is its business."""

    def __init__(self, write: Callable[[dict[str, Any]], None]) -> None:
        self._write = write

    def config(self, config: SchedulerConfig) -> None:
        self._write({"call": "config", "format": FORMAT, "config": asdict(config)})

    def add(self, request: Request, now: float) -> None:
        self._write({"call": "add", "now": now, "request": request.to_json()})

    def reconfigure(self, tenants: tuple[Tenant, ...], now: float) -> None:
        self._write({"call": "reconfigure", "now": now, "tenants": [asdict(tenant) for tenant in tenants]})

    def abort(self, request_id: str, now: float) -> None:
        self._write({"call": "abort", "now": now, "id": request_id})

    def schedule(self, now: float, plan: StepPlan | None) -> None:
        self._write({"call": "schedule", "now": now, "plan": None if plan is None else str(plan)})

    def commit(self, result: StepResult, now: float) -> None:
        self._write(
            {
                "call": "commit",
                "now": now,
                "step_id": result.step_id,
                "tokens": [list(tokens) for tokens in result.tokens],
                "seconds": result.seconds,
                "phases": [list(phase) for phase in result.phases],
                "transfers_done": list(result.transfers_done),
            }
        )


class Decision(NamedTuple):
    """One `schedule` call of a log: the plan line that was recorded and the one decided on replay (None: no plan)."""

    recorded: str | None
    replayed: str | None


def replay(rows: Iterable[dict[str, Any]], build: Callable[[SchedulerConfig], Scheduler]) -> Iterator[Decision]:
    """Feed a log's calls to a fresh scheduler and yield its decisions beside the recorded ones.

    `build` makes the scheduler from the log's configuration (`Scheduler` itself will do). Raises ValueError for a log
    that does not begin with a configuration of a format known here.
    """
    scheduler: Scheduler | None = None
    for row in rows:
        call = row["call"]
        if call == "config":
            if row["format"] != FORMAT:
                raise ValueError(f"input log of format {row['format']}; this version reads format {FORMAT}")
            scheduler = build(_config(row["config"]))
            continue
        if scheduler is None:
            raise ValueError(f"input log begins with {call!r}; expected 'config'")
        if call == "add":
            try:
                scheduler.add(Request.from_json(row["request"]), row["now"])
            except RequestRejected:
                continue  # it was refused when the log was written, too
        elif call == "reconfigure":
            scheduler.reconfigure(_tenants(row["tenants"]), row["now"])
        elif call == "abort":
            scheduler.abort(row["id"], row["now"])
        elif call == "schedule":
            plan = scheduler.schedule(row["now"])
            yield Decision(row["plan"], None if plan is None else str(plan))
        elif call == "commit":
            scheduler.commit(_result(row), row["now"])
        else:
            raise ValueError(f"input log has an unknown call {call!r}")


def _config(fields: dict[str, Any]) -> SchedulerConfig:
    table, *others = fields["cost_prior"]
    return SchedulerConfig(
        **{
            **fields,
            "eos_token_ids": tuple(fields["eos_token_ids"]),
            "cost_prior": CostPrior(tuple(table), *others),
            "tenants": _tenants(fields["tenants"]),
        }
    )


def _tenants(rows: list[dict[str, Any]]) -> tuple[Tenant, ...]:
    return tuple(Tenant(**row) for row in rows)


def _result(row: dict[str, Any]) -> StepResult:
    return StepResult(
        step_id=row["step_id"],
        tokens=tuple(tuple(tokens) for tokens in row["tokens"]),
        seconds=row["seconds"],
        phases=tuple((name, seconds) for name, seconds in row["phases"]),
        transfers_done=tuple(row["transfers_done"]),
    )
