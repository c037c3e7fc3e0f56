"""Open requests and where their events go: the half that every client of an engine has in common.

Lives on one event loop. A stream is a queue; whoever owns the engine puts events in with `dispatch`, the request's
reader takes them out in `read`. A reader that leaves before the last event aborts its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

from pellucid.core.errors import EngineDead, PellucidError, RequestRejected
from pellucid.core.events import Finished, TokensGenerated
from pellucid.core.request import Request

StreamEvent = TokensGenerated | Finished


class Streams:
    """The open requests by id."""

    def __init__(self, submit: Callable[[Request], None], abort: Callable[[str], None]) -> None:
        self._submit = submit
        self._abort = abort
        self._queues: dict[str, asyncio.Queue[StreamEvent | PellucidError]] = {}
        self._dead: str | None = None

    async def read(self, request: Request) -> AsyncIterator[StreamEvent]:
        """Submit a request and yield its events; see `EngineClient.submit`."""
        if self._dead is not None:
            raise EngineDead(self._dead)
        if request.id in self._queues:
            raise RequestRejected("duplicate_id", f"request id {request.id!r} is already in use")
        queue = self._queues[request.id] = asyncio.Queue()
        ended = False
        self._submit(request)
        try:
            while True:
                event = await queue.get()
                ended = not isinstance(event, TokensGenerated)
                if isinstance(event, PellucidError):
                    raise event
                yield event
                if ended:
                    return
        finally:
            del self._queues[request.id]
            if not ended:
                self._abort(request.id)

    def dispatch(self, events: Iterable[StreamEvent]) -> None:
        """Hand events to their readers; those of readers that have left are dropped."""
        for event in events:
            queue = self._queues.get(event.request_id)
            if queue is not None:
                queue.put_nowait(event)

    def reject(self, request_id: str, error: RequestRejected) -> None:
        """The engine refused this request."""
        queue = self._queues.get(request_id)
        if queue is not None:
            queue.put_nowait(error)

    def fail_all(self, reason: str) -> None:
        """The engine is gone: every open stream ends with EngineDead, and so does every later one."""
        self._dead = reason
        for queue in self._queues.values():
            queue.put_nowait(EngineDead(reason))
