"""Replies that may take long: server-sent events, and the watch for clients that hang up.

Invariants: whatever produces a reply is cancelled as soon as the client is gone, whether or not anything was sent; a
stream's headers go out with its first event, so that a refusal before it still has its own status; a stream that fails
later ends with an `error` event and without `[DONE]`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pellucid.core.errors import PellucidError
from pellucid.server.errors import as_api_error
from pellucid.server.wire import Wait, waits_of

T = TypeVar("T")
Write = Callable[[bytes], Awaitable[None]]
log = logging.getLogger("pellucid.server")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None if the client hung up first, whereupon `work` was cancelled and has ended."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.wait((working, watching))


async def all_of(works: list[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all, run side by side; the first failure cancels the others and is raised as it is."""
    if len(works) == 1:
        return [await works[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


class Outlet:
    """Where one reply goes out. `ended` is called once, with the moment when the last byte was written or the reader
    was found gone."""

    def __init__(self) -> None:
        self.ended: Callable[[float], None] = lambda now: None
        self._waits: Sequence[Wait] = ()

    def opened(self, scope: Scope) -> None:
        """The reply goes out over this connection."""
        self._waits = waits_of(scope)

    def seconds_blocked(self, start: float, end: float) -> float:
        """How long writes waited for the reader within [start, end]."""
        return sum(max(0.0, min(end, e) - max(start, b)) for b, e in self._waits)


class WholeReply(Response):
    """A reply in one piece, whose outlet hears when it is out."""

    def __init__(self, content: bytes, headers: Mapping[str, str], outlet: Outlet) -> None:
        super().__init__(content, 200, dict(headers), "application/json")
        self._outlet = outlet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._outlet.opened(scope)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._outlet.ended(time.monotonic())


class EventStream(Response):
    """A reply of server-sent events: `produce` is called once with a function that sends one or more whole events.
    `headers` are read when the first of them goes out."""

    media_type = "text/event-stream"

    def __init__(
        self, produce: Callable[[Write], Coroutine[Any, Any, None]], headers: Mapping[str, str], outlet: Outlet
    ) -> None:
        super().__init__(None, 200, {"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._produce, self._late_headers, self._outlet = produce, headers, outlet
        self._complete_at: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._outlet.opened(scope)
        try:
            await until_disconnect(receive, self._send_all(scope, receive, send))
        finally:
            # Ending the watch for a client that hangs up is not delivery.
            self._outlet.ended(self._complete_at or time.monotonic())

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def write(data: bytes) -> None:
            nonlocal started
            if not started:
                started = True
                self.headers.update(self._late_headers)
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            await self._produce(write)
            await write(b"data: [DONE]\n\n")
        except Exception as error:
            if not isinstance(error, PellucidError):
                log.exception("a stream failed")
            refusal = as_api_error(error)
            if not started:
                await refusal.response()(scope, receive, send)
                return
            await write(b"data: " + refusal.body() + b"\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        self._complete_at = time.monotonic()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
