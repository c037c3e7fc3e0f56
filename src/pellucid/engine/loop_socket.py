"""A ZeroMQ socket on the running event loop, for one message a step.

pyzmq's own asyncio sockets make a future and several scheduled calls of each message: a tenth of what the HTTP process
does for eight streams, on cores that the engine wants. Here a callback reads whatever has come.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import zmq

_READABLE = int(zmq.POLLIN)


class LoopSocket:
    """Binds a PAIR socket; `on_message` gets each message in turn, from the event loop that ran when this was made."""

    def __init__(self, endpoint: str, on_message: Callable[[bytes], None]) -> None:
        self._on_message = on_message
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.bind(endpoint)
        self._unsent: deque[bytes] = deque()  # until the other side is there
        self._loop = asyncio.get_running_loop()
        # The descriptor tells once that something changed, not for as long as something is there to be read: so every
        # call that may take note of a change reads everything.
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._proceed)

    def send(self, message: bytes) -> None:
        """Send now, or when the other side is there."""
        self._unsent.append(message)
        self._flush()
        self._loop.call_soon(self._proceed)

    def close(self) -> None:
        """What was not sent is lost. A second call does nothing."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=0)
            self._context.term()

    def _proceed(self) -> None:
        self._flush()
        while not self._socket.closed and int(self._socket.getsockopt(zmq.EVENTS)) & _READABLE:
            try:
                self._on_message(self._socket.recv(zmq.NOBLOCK))
            except Exception:  # the loop reports it; what came after it is still read
                self._loop.call_soon(self._proceed)
                raise

    def _flush(self) -> None:
        while self._unsent and not self._socket.closed:
            try:
                self._socket.send(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._unsent.popleft()
