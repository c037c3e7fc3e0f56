"""A small OpenAI-compatible server that stamps what it writes, so that a client's stamps can be checked against
truth."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


class FakeServer:
    """Streams `max_tokens` tokens: the first after `first_delay`, then `tokens_per_chunk` at a time every `gap`
    seconds.

    `stamps[i]` are the `time.perf_counter()` readings of request i's writes, `bodies[i]` what was asked. `fail` may
    name a fault: "status" (503), "die" (drop the connection after two chunks), "hang" (stop writing for ever).
    """

    def __init__(
        self,
        *,
        first_delay: float = 0.02,
        gap: float = 0.01,
        tokens_per_chunk: int = 1,
        fail: str = "",
        tokenize_field: str = "prompt",
    ) -> None:
        self.first_delay = first_delay
        self.gap = gap
        self.tokens_per_chunk = tokens_per_chunk
        self.fail = fail
        self.tokenize_field = tokenize_field
        self.bodies: list[dict[str, Any]] = []
        self.arrivals: list[float] = []
        self.stamps: list[list[float]] = []
        self.num_open = 0
        self.max_open = 0
        self.num_answered = 0
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FakeServer]:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/completions", self._reply)
        app.router.add_post("/v1/chat/completions", self._reply)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake"}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.tokenize_field not in body:
            return web.json_response({"error": {"message": "unknown field"}}, status=400)
        words = body[self.tokenize_field].split()
        return web.json_response({"tokens": [sum(word.encode()) % 5000 for word in words], "count": len(words)})

    async def _reply(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        stamps: list[float] = []
        self.bodies.append(body)
        self.arrivals.append(time.perf_counter())
        self.stamps.append(stamps)
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            return await self._stream(request, body, stamps)
        finally:
            self.num_open -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any], stamps: list[float]) -> web.StreamResponse:
        if self.fail == "status":
            return web.json_response({"error": {"message": "overloaded"}}, status=503)
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        await asyncio.sleep(self.first_delay)
        left = body["max_tokens"]
        while left:
            n = min(self.tokens_per_chunk, left)
            left -= n
            choice = {"index": 0, "text": "x" * n, "token_ids": [1] * n, "finish_reason": None if left else "length"}
            stamps.append(time.perf_counter())
            await reply.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            if self.fail == "die" and len(stamps) == 2:
                assert request.transport is not None
                request.transport.close()
                return reply
            if self.fail == "hang" and len(stamps) == 2:
                await asyncio.sleep(3600)
            if left:
                await asyncio.sleep(self.gap)
        prompt = body.get("prompt", "")
        num_prompt = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        usage = {"prompt_tokens": num_prompt, "completion_tokens": body["max_tokens"]}
        await reply.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")
        self.num_answered += 1
        return reply
