"""Steps on their way to whoever watches an engine: the second half that every client has in common.

Lives on one event loop. Summaries come unasked and go to every listener; whole records are asked for with a ticket, and
the answer wakes whoever holds it. A dead engine ends every wait with the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

from pellucid.core.errors import EngineDead
from pellucid.core.step_record import StepRecord, StepSummary
from pellucid.engine import messages

StepListener = Callable[[list[StepSummary]], None]


class StepFeed:
    """The listeners and the open questions. `ask` brings a question to the engine."""

    def __init__(self, ask: Callable[[messages.AskSteps], None]) -> None:
        self._ask = ask
        self._listeners: list[StepListener] = []
        self._tickets = count()
        self._open: dict[int, asyncio.Future[list[bytes]]] = {}
        self._dead: str | None = None

    def listen(self, listener: StepListener) -> None:
        """Call `listener` with every batch from now on."""
        self._listeners.append(listener)

    def tell(self, summaries: list[StepSummary]) -> None:
        """A batch arrived."""
        for listener in self._listeners:
            listener(summaries)

    async def last(self, num_steps: int) -> list[StepRecord]:
        """Ask for the last records and wait for them. Raises EngineDead."""
        if self._dead is not None:
            raise EngineDead(self._dead)
        ticket = next(self._tickets)
        answer = self._open[ticket] = asyncio.get_running_loop().create_future()
        try:
            self._ask(messages.AskSteps(ticket, num_steps))
            return [messages.decode_step_record(record) for record in await answer]
        finally:
            del self._open[ticket]

    def answer(self, message: messages.LastSteps) -> None:
        """The engine answered; whoever asked may have left."""
        asked = self._open.get(message.ticket)
        if asked is not None and not asked.done():
            asked.set_result(message.records)

    def fail_all(self, reason: str) -> None:
        """The engine is gone."""
        self._dead = reason
        for asked in self._open.values():
            if not asked.done():
                asked.set_exception(EngineDead(reason))
