"""The server's end of a connection, set up so that a reader who does not read is noticed.

A reply to such a reader piles up on the way: in the process's buffer, in the kernel's send buffer and in the reader's
own receive buffer. The last is not ours; the first two are kept short here, so that writes wait (and the ledger says
`client`) after some 32 KiB instead of megabytes. The kernel's limit counts what was not sent yet, not what is in
flight, so throughput does not suffer.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

from starlette.types import Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

Wait = tuple[float, float]
"""When a write began to wait for the reader, and when it could go on; on the monotonic clock."""

_UNSENT_BYTES = 16 << 10
_LINUX_TCP_NOTSENT_LOWAT = 25
_EXTENSION = "pellucid.waits"


class EagerProtocol(HttpToolsProtocol):
    """HTTP/1.1 over a connection with short buffers."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timed = self.flow = _TimedFlow(transport)
        transport.set_write_buffer_limits(high=_UNSENT_BYTES)
        connection = cast("socket.socket | None", transport.get_extra_info("socket"))
        if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, _LINUX_TCP_NOTSENT_LOWAT, _UNSENT_BYTES)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast("dict[str, Any]", self.scope)["extensions"] = {_EXTENSION: self._timed.waits}


class _TimedFlow(FlowControl):
    """Remembers the last waits of a connection."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self.waits: deque[Wait] = deque(maxlen=256)

    async def drain(self) -> None:
        began = time.monotonic()
        await super().drain()
        self.waits.append((began, time.monotonic()))


def waits_of(scope: Scope) -> Sequence[Wait]:
    """The waits on the connection of this request; none where it is not served over an `EagerProtocol`."""
    waits: Sequence[Wait] = (scope.get("extensions") or {}).get(_EXTENSION, ())
    return waits
