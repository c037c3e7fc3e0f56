"""An engine in this process, on a thread of its own: for tests and for embedding. The server uses `remote.py`."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence

from pellucid.core.errors import RequestRejected
from pellucid.core.events import Event, Finished
from pellucid.core.request import Request
from pellucid.core.step_record import StepRecord
from pellucid.core.tenants import Tenant
from pellucid.engine import messages
from pellucid.engine.client import EngineState, StepListener, StreamEvent
from pellucid.engine.engine import Engine, EngineStats
from pellucid.engine.looks import Looks
from pellucid.engine.step_feed import StepFeed
from pellucid.engine.streams import Streams
from pellucid.engine.view import EngineView

IDLE_SECONDS = 0.5  # after which an idle engine gives away what it has noted


Item = Request | messages.Abort | messages.Reconfigure | messages.AskSteps | messages.Look


class LocalClient:
    """Implements EngineClient. Construct it inside the event loop that will read the streams."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._streams = Streams(self._inbox.put, lambda request_id: self._inbox.put(messages.Abort(request_id)))
        self._steps = StepFeed(self._inbox.put)
        self._looks = Looks(self._inbox.put)
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

    @property
    def on_late_end(self) -> Callable[[Finished], None] | None:
        return self._streams.on_late_end

    @on_late_end.setter
    def on_late_end(self, listen: Callable[[Finished], None] | None) -> None:
        self._streams.on_late_end = listen

    def submit(self, request: Request) -> AsyncIterator[StreamEvent]:
        return self._streams.read(request)

    def reconfigure(self, tenants: Sequence[Tenant]) -> None:
        self._inbox.put(messages.Reconfigure(list(tenants)))

    def on_steps(self, listener: StepListener) -> None:
        self._steps.listen(listener)

    async def last_steps(self, count: int) -> list[StepRecord]:
        return await self._steps.last(count)

    async def look(self, *, tokens: bool = False) -> EngineView:
        return await self._looks.ask(tokens=tokens)

    async def close(self) -> None:
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)
        self._die("the engine was closed")

    def _run(self) -> None:
        try:
            while self._drain_inbox():
                if self._engine.has_work:
                    self._publish(self._engine.step())
                if summaries := self._engine.take_summaries():
                    self._loop.call_soon_threadsafe(self._steps.tell, summaries)
        except Exception as error:
            self._loop.call_soon_threadsafe(self._die, f"{type(error).__name__}: {error}")

    def _drain_inbox(self) -> bool:
        """Take what has arrived, waiting a moment for it when idle; False when the client was closed."""
        while not self._inbox.empty() or not self._engine.has_work:
            try:
                item = self._inbox.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                return True
            if item is None:
                return False
            self._take(item)
        return True

    def _take(self, item: Item) -> None:
        match item:
            case messages.Abort(request_id=request_id):
                self._publish(self._engine.abort(request_id))
            case messages.Reconfigure(tenants=tenants):
                self._engine.reconfigure(tenants)
            case messages.AskSteps(ticket=ticket, count=count):
                answer = messages.LastSteps(ticket, self._engine.last_steps(count))
                self._loop.call_soon_threadsafe(self._steps.answer, answer)
            case messages.Look(tokens=tokens):
                self._loop.call_soon_threadsafe(self._looks.answer, self._engine.look(tokens=tokens))
            case request:
                self._add(request)

    def _add(self, request: Request) -> None:
        try:
            self._publish(self._engine.add(request))
        except RequestRejected as error:
            self._loop.call_soon_threadsafe(self._streams.reject, request.id, error)

    def _publish(self, events: list[Event]) -> None:
        self._loop.call_soon_threadsafe(self._deliver, messages.Output.of(events, self._engine.stats()))

    def _deliver(self, output: messages.Output) -> None:
        self._stats = output.stats
        for events in (output.queued, output.tokens, output.finished):
            self._streams.dispatch(events)

    def _die(self, reason: str) -> None:
        if self._state != "dead":
            self._state, self._reason = "dead", reason
            self._streams.fail_all(reason)
            self._steps.fail_all(reason)
            self._looks.fail_all(reason)
