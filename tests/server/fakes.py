"""An engine of a few lines: it says what it is told to, and remembers who hung up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from pellucid.core.errors import PellucidError, RequestRejected
from pellucid.core.events import Finished, FinishReason, Queued, TokensGenerated
from pellucid.core.ledger import LedgerReport
from pellucid.core.request import Request
from pellucid.core.step_record import StepRecord
from pellucid.core.tenants import Tenant
from pellucid.engine.client import EngineState, EngineStats, StepListener, StreamEvent
from pellucid.engine.memory_view import PoolView
from pellucid.engine.view import EngineView

QUIET = EngineView(0.0, {}, 0, PoolView(b"\0" * 64, b"\0" * 64, 64, 0, 0, 0), None, (), (), ())
Say = Callable[[Request], list[tuple[int, ...]]]


@dataclass
class FakeEngine:
    """Answers each request with `say(request)`, a list of groups of token ids, up to its max_tokens.

    `hold_after`: wait for `gate` before the group of that number (0: before the first). `fail_after`: raise `failure`
    there instead. `cached` is reported as cached prompt tokens, `ends` as the reason of an end that is its own,
    `predicted` as the time to the first token. `view` is what it looks like.
    """

    say: Say
    state: EngineState = "ready"
    reason: str = ""
    cached: int = 0
    predicted: float | None = None
    ledger: LedgerReport | None = None
    ends: FinishReason = "stop"
    hold_after: int | None = None
    fail_after: int | None = None
    failure: PellucidError = field(default_factory=lambda: RequestRejected("no", "not today"))
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[Request] = field(default_factory=list)
    open: set[str] = field(default_factory=set)
    tenants: list[Tenant] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    closed: bool = False
    on_late_end: Callable[[Finished], None] | None = None
    step_listeners: list[StepListener] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    view: EngineView = QUIET
    looks: list[bool] = field(default_factory=list)

    def on_steps(self, listener: StepListener) -> None:
        self.step_listeners.append(listener)

    async def look(self, *, tokens: bool = False) -> EngineView:
        self.looks.append(tokens)
        return self.view

    async def last_steps(self, count: int) -> list[StepRecord]:
        return self.records[-count:]

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self.open), blocks_free=7, num_steps=3, step_seconds=0.5)

    async def submit(self, request: Request) -> AsyncIterator[StreamEvent]:
        self.requests.append(request)
        self.open.add(request.id)
        finished = False
        try:
            if self.fail_after != 0:
                yield Queued(request.id, self.predicted)
            num_generated, reason = 0, self.ends
            for i, group in enumerate([*self.say(request), ()]):
                if i == self.hold_after:
                    await self.gate.wait()
                if i == self.fail_after:
                    raise self.failure
                await asyncio.sleep(0)
                room = request.sampling.max_tokens - num_generated
                if group[:room]:
                    num_generated += len(group[:room])
                    yield TokensGenerated(request.id, group[:room], self.cached)
                if len(group) >= room:
                    reason = "length"
                    break
            finished = True
            yield Finished(request.id, reason, len(request.prompt), num_generated, self.cached, self.ledger)
        finally:
            self.open.discard(request.id)
            if not finished:
                self.aborted.append(request.id)
                if self.on_late_end is not None:
                    self.on_late_end(Finished(request.id, "abort", len(request.prompt), 0, self.cached))

    def reconfigure(self, tenants: Sequence[Tenant]) -> None:
        self.tenants = list(tenants)

    async def close(self) -> None:
        self.closed = True
