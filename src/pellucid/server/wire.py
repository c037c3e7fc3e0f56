"""The server's end of a connection, set up so that a reader who does not read is noticed.

A reply to such a reader piles up on the way: in the process's buffer, in the kernel's send buffer and in the reader's
own receive buffer. The last is not ours; the first two are kept short here, so that writes wait (and the ledger says
`client`) after some 32 KiB instead of megabytes. The kernel's limit counts what was not sent yet, not what is in
flight, so throughput does not suffer.
"""

from __future__ import annotations

import asyncio
import socket
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_UNSENT_BYTES = 16 << 10
_LINUX_TCP_NOTSENT_LOWAT = 25


class EagerProtocol(HttpToolsProtocol):
    """HTTP/1.1 over a connection with short buffers."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_UNSENT_BYTES)
        connection = cast("socket.socket | None", transport.get_extra_info("socket"))
        if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, _LINUX_TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
