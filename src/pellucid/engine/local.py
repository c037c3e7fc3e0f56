"""An engine in this process, on a thread of its own: for tests and for embedding. The server uses `remote.py`."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator

from pellucid.core.errors import RequestRejected
from pellucid.core.events import Event, Finished, TokensGenerated
from pellucid.core.request import Request
from pellucid.engine.client import EngineState
from pellucid.engine.engine import Engine, EngineStats
from pellucid.engine.streams import Streams


class LocalClient:
    """Implements EngineClient. Construct it inside the event loop that will read the streams."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[Request | str | None] = queue.SimpleQueue()
        self._streams = Streams(self._inbox.put, self._inbox.put)
        self._loop = asyncio.get_running_loop()
        self._state: EngineState = "ready"
        self._reason = ""
        self._stats = engine.stats()
        self._thread = threading.Thread(target=self._run, name="pellucid-engine", daemon=True)
        self._thread.start()

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def reason(self) -> str:
        return self._reason

    def stats(self) -> EngineStats:
        return self._stats

    def submit(self, request: Request) -> AsyncIterator[TokensGenerated | Finished]:
        return self._streams.read(request)

    async def close(self) -> None:
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)
        self._die("the engine was closed")

    def _run(self) -> None:
        try:
            while self._drain_inbox():
                if self._engine.has_work:
                    self._publish(self._engine.step())
        except Exception as error:
            self._loop.call_soon_threadsafe(self._die, f"{type(error).__name__}: {error}")

    def _drain_inbox(self) -> bool:
        """Take what has arrived, waiting for it when idle; False when the client was closed."""
        while not self._inbox.empty() or not self._engine.has_work:
            item = self._inbox.get()
            if item is None:
                return False
            if isinstance(item, str):
                self._publish(self._engine.abort(item))
                continue
            try:
                self._engine.add(item)
            except RequestRejected as error:
                self._loop.call_soon_threadsafe(self._streams.reject, item.id, error)
        return True

    def _publish(self, events: list[Event]) -> None:
        stats = self._engine.stats()
        out = [event for event in events if isinstance(event, (TokensGenerated, Finished))]
        self._loop.call_soon_threadsafe(self._deliver, out, stats)

    def _deliver(self, events: list[TokensGenerated | Finished], stats: EngineStats) -> None:
        self._stats = stats
        self._streams.dispatch(events)

    def _die(self, reason: str) -> None:
        if self._state != "dead":
            self._state, self._reason = "dead", reason
            self._streams.fail_all(reason)
