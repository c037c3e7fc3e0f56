"""Looks at an engine that are not answered yet. Lives on one event loop; answers come in the order of the questions."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from pellucid.core.errors import EngineDead
from pellucid.engine.messages import Look
from pellucid.engine.view import EngineView


class Looks:
    """`send` puts a Look on its way to the engine; whoever hears the engine calls `answer` or `fail_all`."""

    def __init__(self, send: Callable[[Look], object]) -> None:
        self._send = send
        self._open: deque[asyncio.Future[EngineView]] = deque()
        self._dead: str | None = None

    async def ask(self, *, tokens: bool) -> EngineView:
        """See `EngineClient.look`."""
        if self._dead is not None:
            raise EngineDead(self._dead)
        answer: asyncio.Future[EngineView] = asyncio.get_running_loop().create_future()
        self._open.append(answer)
        self._send(Look(tokens))
        return await answer

    def answer(self, view: EngineView) -> None:
        """The engine's answer to the oldest question; its asker may have left."""
        answer = self._open.popleft()
        if not answer.done():
            answer.set_result(view)

    def fail_all(self, reason: str) -> None:
        """The engine is gone."""
        self._dead = reason
        for answer in self._open:
            if not answer.done():
                answer.set_exception(EngineDead(reason))
        self._open.clear()
