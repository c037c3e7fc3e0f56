"""The live stream: one producer for however many watch, and none while nobody does.

The producer looks at the engine once a second, makes one document of it and hands the same bytes to every watcher. A
watcher that reads too slowly loses the oldest of its documents; it never delays the producer or the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque

import msgspec

from pellucid.core.errors import EngineDead
from pellucid.core.step_record import StepSummary
from pellucid.engine.client import EngineClient
from pellucid.engine.view import EngineView
from pellucid.server.ops.document import Subject, Tick, percentiles, rates
from pellucid.server.streaming import Write
from pellucid.telemetry.recent import RecentTimes

log = logging.getLogger("pellucid.server")
MOST_BEHIND = 5  # documents
MOST_STEPS = 512  # in one


class LiveFeed:
    """Looks at `engine` every `period` seconds for as long as somebody watches."""

    def __init__(self, engine: EngineClient, subject: Subject, recent: RecentTimes, *, period: float = 1.0) -> None:
        self._engine, self._subject, self._recent, self._period = engine, subject, recent, period
        self._watchers: list[asyncio.Queue[bytes | None]] = []
        self._producer: asyncio.Task[None] | None = None
        self._steps: deque[StepSummary] = deque(maxlen=MOST_STEPS)
        self._closed = False
        engine.on_steps(self._steps.extend)

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    async def watch(self, write: Write) -> None:
        """Write the stream until the feed is closed, or this is cancelled."""
        documents: asyncio.Queue[bytes | None] = asyncio.Queue(MOST_BEHIND)
        await write(_event("hello", self._subject.hello()))
        if self._closed:
            return
        self._watchers.append(documents)
        if self._producer is None:
            self._producer = asyncio.create_task(self._produce())
        try:
            while (document := await documents.get()) is not None:
                await write(document)
        finally:
            self._watchers.remove(documents)
            if not self._watchers and self._producer is not None:
                self._producer.cancel()
                self._producer = None

    def close(self) -> None:
        """End every stream: an open page must not hold up a server that shuts down."""
        self._closed = True
        for documents in self._watchers:
            _put(documents, None)

    async def _produce(self) -> None:
        self._steps.clear()
        ticks = _Ticks(self._engine, self._subject, self._recent, self._steps)
        try:
            while True:
                began = time.monotonic()
                document = _event("tick", await ticks.next(self._period))
                for documents in self._watchers:
                    _put(documents, document)
                await asyncio.sleep(max(0.0, self._period - (time.monotonic() - began)))
        except Exception:
            log.exception("the live stream failed")
            self._producer = None
            for documents in self._watchers:
                _put(documents, None)
        finally:
            ticks.stop()


class _Ticks:
    """Makes one tick after another."""

    def __init__(self, engine: EngineClient, subject: Subject, recent: RecentTimes, steps: deque[StepSummary]) -> None:
        self._engine, self._subject, self._recent, self._steps = engine, subject, recent, steps
        self._before = engine.stats()
        self._before_at = self._began = time.monotonic()
        self._look: asyncio.Task[EngineView] | None = None
        self._asked_at = 0.0

    async def next(self, patience: float) -> Tick:
        """The tick of now; without the engine's inside if it does not answer within `patience` seconds."""
        view = await self._view(patience)
        now, stats = time.monotonic(), self._engine.stats()
        since = max(now - self._before_at, 1e-3)
        tick = Tick(
            at=round(now - self._began, 3),
            state=self._engine.state,
            reason=self._engine.reason,
            late=0.0 if self._look is None else round(now - self._asked_at, 3),
            running=stats.num_running,
            waiting=stats.num_waiting,
            rates=rates(self._before, stats, since),
            ttft=percentiles(self._recent.ttft, now),
            itl=percentiles(self._recent.itl, now),
            steps=self._subject.steps(list(self._steps)),
            inside=None if view is None else self._subject.inside(view),
        )
        self._steps.clear()
        self._before, self._before_at = stats, now
        return tick

    async def _view(self, patience: float) -> EngineView | None:
        if self._look is None:
            if self._engine.state != "ready":
                return None
            self._look = asyncio.create_task(self._engine.look(tokens=self._subject.decode is not None))
            self._asked_at = time.monotonic()
        await asyncio.wait((self._look,), timeout=patience)
        if not self._look.done():
            return None
        look, self._look = self._look, None
        with contextlib.suppress(EngineDead):
            return look.result()
        return None

    def stop(self) -> None:
        if self._look is not None:
            self._look.cancel()


def _event(name: str, document: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(document))


def _put(documents: asyncio.Queue[bytes | None], document: bytes | None) -> None:
    if documents.full():
        documents.get_nowait()
    documents.put_nowait(document)
