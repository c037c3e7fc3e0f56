"""Open requests and where their events go: the half that every client of an engine has in common.

Lives on one event loop. A stream is an inbox; whoever owns the engine puts events in with `dispatch`, the request's
reader takes them out in `read`. A reader that leaves before the last event aborts its request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable

from pellucid.core.errors import EngineDead, PellucidError, RequestRejected
from pellucid.core.events import Finished, TokensGenerated
from pellucid.core.request import Request
from pellucid.engine.client import StreamEvent

MOST_MERGED_TOKENS = 256


class Inbox:
    """Events on their way to one reader. Tokens that a reader has not fetched yet are merged, so that one that lags
    catches up in a few large pieces instead of falling further behind."""

    def __init__(self) -> None:
        self._events: deque[StreamEvent | PellucidError] = deque()
        self._wake = asyncio.Event()

    def put(self, event: StreamEvent | PellucidError) -> None:
        last = self._events[-1] if self._events else None
        if (
            isinstance(event, TokensGenerated)
            and isinstance(last, TokensGenerated)
            and len(last.token_ids) < MOST_MERGED_TOKENS
        ):
            self._events[-1] = last._replace(token_ids=last.token_ids + event.token_ids)
        else:
            self._events.append(event)
        self._wake.set()

    async def get(self) -> StreamEvent | PellucidError:
        while not self._events:
            self._wake.clear()
            await self._wake.wait()
        return self._events.popleft()


class Streams:
    """The open requests by id."""

    def __init__(self, submit: Callable[[Request], None], abort: Callable[[str], None]) -> None:
        self._submit = submit
        self._abort = abort
        self._inboxes: dict[str, Inbox] = {}
        self.on_late_end: Callable[[Finished], None] | None = None
        self._dead: str | None = None

    async def read(self, request: Request) -> AsyncIterator[StreamEvent]:
        """Submit a request and yield its events; see `EngineClient.submit`."""
        if self._dead is not None:
            raise EngineDead(self._dead)
        if request.id in self._inboxes:
            raise RequestRejected("duplicate_id", f"request id {request.id!r} is already in use")
        inbox = self._inboxes[request.id] = Inbox()
        ended = False
        self._submit(request)
        try:
            while True:
                event = await inbox.get()
                ended = isinstance(event, Finished | PellucidError)
                if isinstance(event, PellucidError):
                    raise event
                yield event
                if ended:
                    return
        finally:
            del self._inboxes[request.id]
            if not ended:
                self._abort(request.id)

    def dispatch(self, events: Iterable[StreamEvent]) -> None:
        """Hand events to their readers. Of readers that have left only the ends are of interest, to `on_late_end`."""
        for event in events:
            inbox = self._inboxes.get(event.request_id)
            if inbox is not None:
                inbox.put(event)
            elif isinstance(event, Finished) and self.on_late_end is not None:
                self.on_late_end(event)

    def reject(self, request_id: str, error: RequestRejected) -> None:
        """The engine refused this request."""
        inbox = self._inboxes.get(request_id)
        if inbox is not None:
            inbox.put(error)

    def fail_all(self, reason: str) -> None:
        """The engine is gone: every open stream ends with EngineDead, and so does every later one."""
        self._dead = reason
        for inbox in self._inboxes.values():
            inbox.put(EngineDead(reason))
