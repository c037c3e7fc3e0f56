"""The server's half of every ledger: what passed before the engine had a request, and after its last token.

An `OpenLedger` follows one request to the engine (one choice of a reply). The engine's report and the end of the reply
come in either order, as a stop string or a client that hangs up is seen here before the engine hears of it; when both
are known the ledger is closed, and the desk hands it to whoever listens (the store, metrics, a recorder).

All clocks are this machine's monotonic one, which the engine's process shares. Up to the submission it is `tokenize`;
from the engine's last token to the last byte it is `client` while a write waits for the reader, else `deliver`. Who
reads slowly while the engine still computes costs nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pellucid.core import ledger as cause
from pellucid.core.events import Finished
from pellucid.core.ledger import Causes, Floors, LedgerReport, Miss, Phase, TokenCounts
from pellucid.core.request import Request
from pellucid.engine.client import EngineClient
from pellucid.server.streaming import Outlet
from pellucid.telemetry.store import StoredRequest, StoreReader

_NUM_RECENT = 1024  # closed ledgers that are at hand without the store
_REPORT_SECONDS = 10.0  # how long a reply waits for the engine to close a ledger that it should hold


class Served(NamedTuple):
    """A request that ended, whole: as it is stored, as it was asked, and what was answered. `arrival` is on the
    monotonic clock; `trace` are the headers that name the caller's trace."""

    record: StoredRequest
    request: Request
    arrival: float
    output_ids: tuple[int, ...]
    trace: Mapping[str, str]


class OpenLedger:
    """Of one request to the engine, from its arrival on. `outlet` times the reply that it is part of, `trace` goes into
    what is `Served`."""

    def __init__(
        self, desk: LedgerDesk, request: Request, arrival: float, outlet: Outlet, trace: Mapping[str, str]
    ) -> None:
        self._desk, self.request, self.arrival, self._outlet, self._trace = desk, request, arrival, outlet, trace
        self._first_sent: float | None = None
        self._last_sent: float | None = None
        self._reason = "disconnect"
        self._report: LedgerReport | None = None
        self._reported = asyncio.Event()
        self._output_ids: list[int] = []

    def tokens(self, token_ids: tuple[int, ...]) -> None:
        """Tokens came from the engine."""
        self._output_ids += token_ids

    def sent(self) -> None:
        """A chunk of its choice was written."""
        self._last_sent = time.monotonic()
        if self._first_sent is None:
            self._first_sent = self._last_sent

    @property
    def last_sent(self) -> float | None:
        """When the last chunk of its choice was written."""
        return self._last_sent

    def finished(self, report: LedgerReport | None) -> None:
        """The engine closed its half; None if it kept none."""
        if report is not None:
            self._report = self._desk.worded(report, self.request.prompt)
        self._reported.set()

    def ended(self, reason: str) -> None:
        """The choice ended: "stop", "length", "disconnect", "error", ... What was "rejected" has no ledger."""
        self._reason = reason
        if reason == "rejected":
            self._desk.discard(self)

    async def report(self) -> LedgerReport:
        """The ledger up to now, for the end of a reply. Waits until the engine has closed its half, which it has unless
        the end was seen on this side first."""
        with suppress(TimeoutError):  # then it is not going to answer
            await asyncio.wait_for(self._reported.wait(), _REPORT_SECONDS)
        return self._framed(time.monotonic())

    @property
    def is_reported(self) -> bool:
        """Whether the engine has closed its half."""
        return self._reported.is_set()

    @property
    def engine_end(self) -> float:
        """When the engine was done with it, as far as it has said so."""
        return self.request.arrival + (self._report.e2e_seconds if self._report is not None else 0.0)

    def close(self, end: float) -> Served:
        """The whole ledger, from arrival to the last byte at `end`."""
        record = StoredRequest(
            id=self.request.id,
            tenant=self.request.tenant,
            finished_at=time.time() - (time.monotonic() - end),
            reason=self._reason,
            ledger=self._framed(end),
        )
        return Served(record, self.request, self.arrival, tuple(self._output_ids), self._trace)

    def _framed(self, end: float) -> LedgerReport:
        submitted = self.request.arrival
        report = self._report or self._without_engine(max(end, submitted))
        engine_end = submitted + report.e2e_seconds
        if end < engine_end:
            report, engine_end = report.ended_at(max(0.0, end - submitted)), max(end, submitted)
        first: Causes = ()
        if report.first_token_seconds is not None and self._first_sent is not None:
            first = self._split(submitted + report.first_token_seconds, self._first_sent)
        return report.framed(
            receive=((cause.TOKENIZE, submitted - self.arrival),),
            deliver=self._split(engine_end, end),
            first_deliver=first,
        )

    def _split(self, start: float, end: float) -> Causes:
        """The time from the engine's part to a byte's going out, by whom it waited for."""
        whole = max(0.0, end - start)
        client = min(whole, self._outlet.seconds_blocked(start, end))
        return ((cause.DELIVER, whole - client), (cause.CLIENT, client))

    def _without_engine(self, end: float) -> LedgerReport:
        """The engine took its books with it, or kept none: all of its part is a gap."""
        seconds = end - self.request.arrival
        phase = Phase("queue", 0.0, seconds, ((cause.ENGINE_GAP, seconds),))
        tokens = TokenCounts(len(self.request.prompt), 0, 0, 0, len(self._output_ids))
        return LedgerReport(seconds, (phase,), None, tokens, Floors(0.0, 0.0, 0.0))


class LedgerDesk:
    """All ledgers of a server, open and closed. `listeners` are called with each that closes, on the event loop: they
    must not wait for anything. `decode` turns token ids into text and is None unless texts may be shown."""

    def __init__(self, engine: EngineClient, decode: Callable[[Sequence[int]], str] | None = None) -> None:
        self._decode = decode
        self.listeners: list[Callable[[Served], None]] = []
        self.store: Path | None = None  # where closed ledgers can be read that are not at hand any more
        self._engine = engine
        self._open: dict[str, OpenLedger] = {}
        self._ends: dict[str, float] = {}  # replies that ended and wait for the engine's report
        self._recent: OrderedDict[str, StoredRequest] = OrderedDict()
        engine.on_late_end = self._late

    def open(self, request: Request, arrival: float, outlet: Outlet, *, trace: Mapping[str, str]) -> OpenLedger:
        """A request is about to be submitted."""
        opened = self._open[request.id] = OpenLedger(self, request, arrival, outlet, trace)
        return opened

    def discard(self, opened: OpenLedger) -> None:
        """The engine refused it: there is nothing to account for."""
        self._open.pop(opened.request.id, None)

    def replies_ended(self, ends: Iterable[tuple[OpenLedger, float]]) -> None:
        """The last bytes of these went out at these moments, or their client was gone by then."""
        for opened, end in ends:
            if opened.request.id not in self._open:
                continue
            if opened.is_reported or self._engine.state == "dead":
                self._close(opened, end)
            else:
                self._ends[opened.request.id] = end

    @property
    def oldest_arrival(self) -> float | None:
        """When the oldest request arrived whose ledger is still open."""
        return min((opened.arrival for opened in self._open.values()), default=None)

    def tenant_of_open(self, request_id: str) -> str | None:
        """Whose request this is, if its ledger is still open."""
        opened = self._open.get(request_id)
        return None if opened is None else opened.request.tenant

    def worded(self, report: LedgerReport, prompt: Sequence[int]) -> LedgerReport:
        """The report with texts where prompts left what was cached, and without the tokens that they are made of."""
        if not any(miss.there for miss in report.misses):
            return report
        return replace(report, misses=tuple(self._worded(miss, prompt) for miss in report.misses))

    def _worded(self, miss: Miss, prompt: Sequence[int]) -> Miss:
        if self._decode is None or not miss.there or miss.at is None:
            return miss._replace(there=())
        here = prompt[int(miss.at) : int(miss.at) + len(miss.there)]
        return miss._replace(there=(), texts=(self._decode(here), self._decode(miss.there)))

    async def find(self, request_id: str) -> StoredRequest | None:
        """A closed ledger, from memory or from the store."""
        found = self._recent.get(request_id)
        if found is None and self.store is not None:
            found = await asyncio.to_thread(_read, self.store, request_id)
        return found

    def close(self) -> None:
        """The server stops: whatever the engine did not report is closed without it."""
        for request_id, end in list(self._ends.items()):
            self._close(self._open[request_id], end)

    def _late(self, event: Finished) -> None:
        """The engine closed a ledger whose reader had left."""
        opened = self._open.get(event.request_id)
        if opened is None:
            return
        opened.finished(event.ledger)
        if event.request_id in self._ends:
            self._close(opened, self._ends[event.request_id])

    def _close(self, opened: OpenLedger, end: float) -> None:
        del self._open[opened.request.id]
        self._ends.pop(opened.request.id, None)
        served = opened.close(end)
        self._recent[opened.request.id] = served.record
        if len(self._recent) > _NUM_RECENT:
            self._recent.popitem(last=False)
        for listen in self.listeners:
            listen(served)


def _read(path: Path, request_id: str) -> StoredRequest | None:
    reader = StoreReader(path)
    try:
        found = reader.get(request_id)
    finally:
        reader.close()
    return found if found is not None and found.id == request_id else None
