"""How the rest of the program reaches an engine: submit a request, read its events, hang up to abort.

The engine may live in its own process (the server, so that HTTP work never delays a step) or in this one (tests, the
offline face). Callers cannot tell which.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Literal, Protocol

from pellucid.core.events import Finished, TokensGenerated
from pellucid.core.request import Request
from pellucid.engine.engine import EngineStats as EngineStats

EngineState = Literal["starting", "ready", "dead"]


class EngineClient(Protocol):
    """The engine as its users see it."""

    @property
    def state(self) -> EngineState: ...

    @property
    def reason(self) -> str:
        """Why the engine is dead, or what it is doing while it starts; empty when ready."""
        ...

    def stats(self) -> EngineStats: ...

    def submit(self, request: Request) -> AsyncIterator[TokensGenerated | Finished]:
        """Start a request and yield its events; the last one is Finished.

        Raises RequestRejected where the engine refuses it and EngineDead when the engine is or becomes dead. Closing
        the iterator (or cancelling the task that reads it) before the end aborts the request and frees its blocks
        within one step.
        """
        ...

    async def close(self) -> None:
        """Stop the engine; open requests get EngineDead."""
        ...
