"""The engine's own process: warm up, build, say ready, then serve messages and steps until told to stop.

It never outlives its parent, and it never dies silently: whatever ends it is the last message on the socket.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

import zmq

from pellucid.core.errors import PellucidError, RequestRejected
from pellucid.core.events import Event
from pellucid.engine import messages
from pellucid.engine.engine import Engine

# Builds the engine; is given a function to report progress to.
EngineBuilder = Callable[[Callable[[str], None]], Engine]

IDLE_POLL_MS = 1000


def run(warm_up: Callable[[], None] | None, orders: Connection, endpoint: str) -> None:
    """Process entry: warm up, then build what `orders` brings. `endpoint` is the ZeroMQ address that the parent listens
    on. Ends where the parent ended without having given orders."""
    for sent_to_the_group in (signal.SIGINT, signal.SIGHUP):  # Ctrl-C, a terminal that closes: the parent decides
        signal.signal(sent_to_the_group, signal.SIG_IGN)
    parent = os.getppid()
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)  # a step never waits for a slow reader
    socket.connect(endpoint)
    gc.disable()  # what a start loads stays: collecting on the way finds next to nothing and took a tenth of the time
    try:
        if warm_up is not None:
            warm_up()
        try:
            build: EngineBuilder = orders.recv()
        except EOFError:
            return
        engine = build(lambda text: socket.send(messages.encode(messages.Progress(text))))
        gc.freeze()  # the collector need never look at what is loaded now
        gc.enable()
        socket.send(messages.encode(messages.Ready(engine.description, engine.stats())))
        _loop(engine, socket, parent)
    except PellucidError as error:
        socket.send(messages.encode(messages.Died(str(error), expected=True)))
        sys.exit(2)
    except BaseException as error:
        traceback.print_exc()
        socket.send(messages.encode(messages.Died(f"{type(error).__name__}: {error}", expected=False)))
        sys.exit(1)
    finally:
        context.destroy(linger=1000)


def _loop(engine: Engine, socket: zmq.Socket[bytes], parent: int) -> None:
    while os.getppid() == parent:
        timeout = 0 if engine.has_work else IDLE_POLL_MS
        while socket.poll(timeout):
            message = messages.decode_to_engine(socket.recv())
            if isinstance(message, messages.Stop):
                return
            _handle(message, engine, socket)
            timeout = 0
        if engine.has_work:
            _publish(engine.step(), engine, socket)
        else:
            engine.check_when_idle()
        if summaries := engine.take_summaries():
            socket.send(messages.encode(messages.Steps(summaries)))


def _handle(
    message: messages.Add | messages.Abort | messages.Reconfigure | messages.AskSteps | messages.Look,
    engine: Engine,
    socket: zmq.Socket[bytes],
) -> None:
    match message:
        case messages.Add():
            try:
                _publish(engine.add(message.request()), engine, socket)
            except RequestRejected as error:
                socket.send(messages.encode(messages.Rejected.of(message.id, error)))
        case messages.Abort():
            _publish(engine.abort(message.request_id), engine, socket)
        case messages.Reconfigure():
            engine.reconfigure(message.tenants)
        case messages.AskSteps():
            socket.send(messages.encode(messages.LastSteps(message.ticket, engine.last_steps(message.count))))
        case messages.Look():
            socket.send(messages.encode(messages.View(engine.look(tokens=message.tokens))))


def _publish(events: list[Event], engine: Engine, socket: zmq.Socket[bytes]) -> None:
    if events:
        socket.send(messages.encode(messages.Output.of(events, engine.stats())))
