"""The socket of the engine's client: nothing is lost or reordered, whoever comes first, however much comes at once."""

from __future__ import annotations

import asyncio
import threading
import uuid

import pytest
import zmq

from pellucid.engine.loop_socket import LoopSocket

COUNT = 5000


@pytest.fixture
def endpoint() -> str:
    return f"ipc:///tmp/pellucid-test-{uuid.uuid4().hex[:12]}"


def echo(endpoint: str, count: int, late: threading.Event) -> None:
    """The other side, in a thread: connects when told, returns what it gets, and says so many more words itself."""
    late.wait()
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.set_hwm(0)
        socket.connect(endpoint)
        for _ in range(count):
            socket.send(socket.recv())
        for i in range(count):
            socket.send(b"own %d" % i)
        socket.recv()


def test_messages_come_whole_and_in_order_whenever_the_other_side_connects(endpoint: str) -> None:
    async def run() -> list[bytes]:
        received: list[bytes] = []
        done = asyncio.Event()

        def take(message: bytes) -> None:
            received.append(message)
            if len(received) == 2 * COUNT:
                done.set()

        socket = LoopSocket(endpoint, take)
        late = threading.Event()
        other = threading.Thread(target=echo, args=(endpoint, COUNT, late))
        other.start()
        for i in range(COUNT // 2):  # nobody is there yet
            socket.send(b"%d" % i)
        late.set()
        for i in range(COUNT // 2, COUNT):
            if i % 100 == 0:
                await asyncio.sleep(0.001)
            socket.send(b"%d" % i)
        await asyncio.wait_for(done.wait(), 20)
        socket.send(b"enough")
        await asyncio.to_thread(other.join)
        socket.close()
        socket.close()
        return received

    received = asyncio.run(run())
    assert received == [b"%d" % i for i in range(COUNT)] + [b"own %d" % i for i in range(COUNT)]


def test_a_message_that_cannot_be_handled_is_reported_and_the_next_ones_are_read(endpoint: str) -> None:
    async def run() -> tuple[list[bytes], list[object]]:
        received: list[bytes] = []
        reported: list[object] = []

        def take(message: bytes) -> None:
            received.append(message)
            if message == b"1":
                raise ValueError("cannot be handled")

        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context["exception"]))
        socket = LoopSocket(endpoint, take)
        with zmq.Context() as context, context.socket(zmq.PAIR) as other:
            other.connect(endpoint)
            for i in range(4):
                other.send(b"%d" % i)
            await asyncio.sleep(0.2)
            other.close(linger=0)
        socket.close()
        return received, reported

    received, reported = asyncio.run(run())
    assert received == [b"0", b"1", b"2", b"3"]
    assert len(reported) == 1


def test_what_was_not_sent_does_not_keep_it_from_closing(endpoint: str) -> None:
    async def run() -> None:
        socket = LoopSocket(endpoint, lambda message: None)
        socket.send(b"to nobody")
        socket.close()
        await asyncio.sleep(0.01)

    asyncio.run(run())
