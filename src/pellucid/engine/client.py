"""How the rest of the program reaches an engine: submit a request, read its events, hang up to abort.

The engine may live in its own process (the server, so that HTTP work never delays a step) or in this one (tests, the
offline face). Callers cannot tell which.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Literal, Protocol

from pellucid.core.events import Finished, Queued, TokensGenerated
from pellucid.core.request import Request
from pellucid.core.step_record import StepRecord
from pellucid.core.tenants import Tenant
from pellucid.engine.engine import EngineStats as EngineStats
from pellucid.engine.step_feed import StepListener as StepListener
from pellucid.engine.view import EngineView

EngineState = Literal["starting", "ready", "dead"]
StreamEvent = Queued | TokensGenerated | Finished
"""What a request's reader gets: Queued first, Finished last."""


class EngineClient(Protocol):
    """The engine as its users see it. `on_late_end` is called with the end of each request whose reader had left before
    it, and so aborted it."""

    on_late_end: Callable[[Finished], None] | None

    @property
    def state(self) -> EngineState: ...

    @property
    def reason(self) -> str:
        """Why the engine is dead, or what it is doing while it starts; empty when ready."""
        ...

    def stats(self) -> EngineStats: ...

    def submit(self, request: Request) -> AsyncIterator[StreamEvent]:
        """Start a request and yield its events: Queued, its tokens, Finished.

        Raises RequestRejected where the engine refuses it and EngineDead when the engine is or becomes dead. Closing
        the iterator (or cancelling the task that reads it) before the end aborts the request and frees its blocks
        within one step.
        """
        ...

    def reconfigure(self, tenants: Sequence[Tenant]) -> None:
        """From the next step on these are the tenants; requests that are open stay. Does nothing to a dead engine."""
        ...

    def on_steps(self, listener: StepListener) -> None:
        """Have `listener` called, on the event loop, with the steps since it was called last: at most twice a second,
        each step once, in order."""
        ...

    async def last_steps(self, count: int) -> list[StepRecord]:
        """The last `count` steps that the engine's recorder kept, oldest first; empty without a recorder. Answered
        between two steps. Raises EngineDead."""
        ...

    async def look(self, *, tokens: bool = False) -> EngineView:
        """What the engine looks like before its next step; see `engine/view.py`. `tokens`: with the first token ids of
        prompts and cached branches. Raises EngineDead when the engine is or becomes dead."""
        ...

    async def close(self) -> None:
        """Stop the engine; open requests get EngineDead."""
        ...
