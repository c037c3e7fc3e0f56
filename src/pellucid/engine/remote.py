"""An engine in its own process, reached over a local socket. If it dies, every open request hears why, at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from pellucid.core.errors import EngineDead
from pellucid.core.events import Finished
from pellucid.core.request import Request
from pellucid.core.step_record import StepRecord
from pellucid.core.tenants import Tenant
from pellucid.engine import messages, worker
from pellucid.engine.client import EngineState, StepListener, StreamEvent
from pellucid.engine.engine import EngineStats
from pellucid.engine.looks import Looks
from pellucid.engine.loop_socket import LoopSocket
from pellucid.engine.process import EngineProcess
from pellucid.engine.step_feed import StepFeed
from pellucid.engine.streams import Streams
from pellucid.engine.view import EngineView

STOP_SECONDS = 5.0


class RemoteClient:
    """Implements EngineClient. `build` runs in the engine's process and must be picklable (a function of a module, or
    a `functools.partial` of one). That process is a new one, or one that was started before; this object closes it."""

    def __init__(
        self,
        build: worker.EngineBuilder,
        *,
        process: EngineProcess | None = None,
        on_progress: Callable[[str], None] | None = None,
    ) -> None:
        self._engine = process or EngineProcess()
        self._process = self._engine.process
        self._on_progress = on_progress
        self._streams = Streams(self._send_add, self._send_abort)
        self._steps = StepFeed(self._send_question)
        self._looks = Looks(self._send_question)
        self._state: EngineState = "starting"
        self._reason = "starting the engine process"
        self._stats = EngineStats()
        self._closed = False
        self.description = ""  # on what the engine runs; known once it is ready
        self._ready = asyncio.Event()
        self._socket = LoopSocket(self._engine.endpoint, self._receive)
        self._engine.build(build)
        self._watching = asyncio.create_task(self._watch())

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def reason(self) -> str:
        return self._reason

    @property
    def pid(self) -> int | None:
        """The engine process's id."""
        return self._process.pid

    def stats(self) -> EngineStats:
        return self._stats

    async def wait_ready(self) -> None:
        """Return when the engine is ready; raise EngineDead, with the reason, if it died while it started."""
        await self._ready.wait()
        if self._state == "dead":
            raise EngineDead(self._reason)

    @property
    def on_late_end(self) -> Callable[[Finished], None] | None:
        return self._streams.on_late_end

    @on_late_end.setter
    def on_late_end(self, listen: Callable[[Finished], None] | None) -> None:
        self._streams.on_late_end = listen

    def submit(self, request: Request) -> AsyncIterator[StreamEvent]:
        return self._streams.read(request)

    def reconfigure(self, tenants: Sequence[Tenant]) -> None:
        if self._state != "dead":
            self._socket.send(messages.encode(messages.Reconfigure(list(tenants))))

    def on_steps(self, listener: StepListener) -> None:
        self._steps.listen(listener)

    async def last_steps(self, count: int) -> list[StepRecord]:
        return await self._steps.last(count)

    async def look(self, *, tokens: bool = False) -> EngineView:
        return await self._looks.ask(tokens=tokens)

    async def close(self) -> None:
        """Ask the engine to stop, then insist. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._process.is_alive():
            self._socket.send(messages.encode(messages.Stop()))
            await asyncio.to_thread(self._process.join, STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        self._die("the engine was stopped")
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        self._socket.close()
        self._engine.close()

    def _send_add(self, request: Request) -> None:
        self._socket.send(messages.encode(messages.Add.of(request)))

    def _send_question(self, question: messages.AskSteps | messages.Look) -> None:
        self._socket.send(messages.encode(question))

    def _send_abort(self, request_id: str) -> None:
        if self._state != "dead":
            self._socket.send(messages.encode(messages.Abort(request_id)))

    def _receive(self, data: bytes) -> None:
        match message := messages.decode_from_engine(data):
            case messages.Output():
                self._stats = message.stats
                for events in (message.queued, message.tokens, message.finished):
                    self._streams.dispatch(events)
            case messages.Steps():
                self._steps.tell(message.summaries)
            case messages.LastSteps():
                self._steps.answer(message)
            case messages.View():
                self._looks.answer(message.view)
            case messages.Rejected():
                self._streams.reject(message.request_id, message.error())
            case messages.Progress():
                self._reason = message.text
                if self._on_progress is not None:
                    self._on_progress(message.text)
            case messages.Ready():
                self._stats, self.description = message.stats, message.description
                self._state, self._reason = "ready", ""
                self._ready.set()
            case messages.Died():
                self._die(message.reason)

    async def _watch(self) -> None:
        """Wait for the process to end. Its last message may still be on the way: it knows better why."""
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        loop.add_reader(self._process.sentinel, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(self._process.sentinel)
        await asyncio.sleep(0.1)
        self._process.join(timeout=1)
        self._die(f"the engine process ended ({_describe(self._process.exitcode)})")

    def _die(self, reason: str) -> None:
        if self._state != "dead":
            self._state, self._reason = "dead", reason
            self._ready.set()
            self._streams.fail_all(reason)
            self._steps.fail_all(reason)
            self._looks.fail_all(reason)


def _describe(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        hint = "; the system may be out of memory" if exit_code == -9 else ""
        return f"killed by signal {-exit_code}{hint}"
    return f"exit code {exit_code}"
