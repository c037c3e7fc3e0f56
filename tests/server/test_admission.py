"""Bounds and deadlines from HTTP to the scheduler and back, over a real engine whose steps take their time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.conftest import LIMITS, TEMPLATE, listening
from tests.server.test_api import error
from tests.server.test_end_to_end import Speller

from pellucid.core.scheduler import Scheduler
from pellucid.engine.engine import Engine
from pellucid.engine.local import LocalClient
from pellucid.server.app import create_app
from pellucid.server.config import ServedModel, ServerConfig
from pellucid.server.tenancy import Tenancy
from pellucid.server.tenants import new_key
from pellucid.text.chat_template import ChatTemplate
from pellucid.text.tokenizer import Tokenizer

TIGHT, METERED, SMALL, FREE = (new_key() for _ in range(4))
FILE = f"""
[tenants.tight]
keys = ["{TIGHT.hash}"]
max_running = 1
max_waiting = 1
[tenants.metered]
keys = ["{METERED.hash}"]
tokens_per_minute = 60
[tenants.small]
keys = ["{SMALL.hash}"]
kv_share = 0.125
[tenants.free]
keys = ["{FREE.hash}"]
"""


@pytest.fixture
async def client(tokenizer: Tokenizer) -> LocalClient:
    executor = Speller(LIMITS, tokenizer.encode("the theory of "))
    executor.seconds = 0.005
    return LocalClient(Engine(Scheduler(LIMITS), executor, time.monotonic))


@pytest.fixture
async def http(client: LocalClient, tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    path = tmp_path / "tenants.toml"
    path.write_text(FILE)
    served = ServedModel("tiny", tokenizer, LIMITS, ChatTemplate(TEMPLATE, tokenizer))
    tenancy = Tenancy.of_file(path, served, api_key=None, state_directory=tmp_path)
    client.reconfigure(tenancy.roster.tenants)
    app = create_app(client, served, ServerConfig(tenants=path), tenancy)
    async with listening(app) as url, httpx.AsyncClient(base_url=url, timeout=30) as http:
        yield http


async def complete(http: httpx.AsyncClient, key: Any, **fields: Any) -> httpx.Response:
    asked = {"prompt": "the", "max_tokens": 2} | fields
    return await http.post("/v1/completions", json=asked, headers={"Authorization": f"Bearer {key.key}"})


@asynccontextmanager
async def one_running(http: httpx.AsyncClient, key: Any) -> AsyncIterator[None]:
    """While the block runs, a request of this tenant does, too."""
    asked = {"prompt": "the", "max_tokens": 500, "stream": True}
    headers = {"Authorization": f"Bearer {key.key}"}
    async with http.stream("POST", "/v1/completions", json=asked, headers=headers) as reply:
        chunks = reply.aiter_raw()  # held on to, as the connection would be closed with it
        await anext(chunks)
        yield


async def test_every_reply_says_what_was_expected(http: httpx.AsyncClient) -> None:
    for stream in (False, True):
        reply = await complete(http, FREE, stream=stream)
        assert int(reply.headers["x-pellucid-predicted-ttft-ms"]) >= 0


async def test_a_full_queue_is_its_tenants_alone(http: httpx.AsyncClient, client: LocalClient) -> None:
    async with one_running(http, TIGHT):
        waiting = asyncio.create_task(complete(http, TIGHT))
        while client.stats().num_waiting == 0:
            await asyncio.sleep(0.005)
        reply = await complete(http, TIGHT)
        refusal = reply.json()["error"]
        assert (reply.status_code, refusal["code"], refusal["limit"]) == (429, "tenant_queue_full", "tenant")
        assert refusal["message"] == "1 requests of this tenant are waiting; it may queue 1"
        assert int(reply.headers["retry-after"]) >= refusal["retry_after"] >= 1
        assert (await complete(http, FREE)).status_code == 200
        assert not waiting.done()
    assert (await waiting).status_code == 200


async def test_a_spent_allowance_says_when_it_is_back(http: httpx.AsyncClient) -> None:
    assert (await complete(http, METERED, max_tokens=90)).status_code == 200
    reply = await complete(http, METERED)
    refusal = reply.json()["error"]
    assert (reply.status_code, refusal["code"], refusal["limit"]) == (429, "tokens_per_minute", "tenant")
    assert 20 <= refusal["retry_after"] <= int(reply.headers["retry-after"]) <= 32
    assert (await complete(http, FREE)).status_code == 200


async def test_what_can_never_fit_a_share_is_no_matter_of_time(http: httpx.AsyncClient) -> None:
    reply = await complete(http, SMALL, prompt=[5] * 200)
    refusal = reply.json()["error"]
    assert (reply.status_code, refusal["code"], refusal["limit"]) == (400, "kv_share_exceeded", "tenant")
    assert "retry-after" not in reply.headers
    assert (await complete(http, FREE, prompt=[5] * 200)).status_code == 200


async def test_a_hopeless_deadline_is_refused_at_once(http: httpx.AsyncClient) -> None:
    async with one_running(http, FREE):
        reply = await complete(http, FREE, prompt=[5] * 400, deadline_ms=1)
    refusal = reply.json()["error"]
    assert (reply.status_code, refusal["code"], refusal["limit"]) == (503, "deadline_hopeless", "machine")
    assert int(reply.headers["retry-after"]) >= 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_that_passes_in_the_queue_has_its_own_error(http: httpx.AsyncClient, stream: bool) -> None:
    async with one_running(http, TIGHT):
        assert error(await complete(http, TIGHT, stream=stream, deadline_ms=800), 504)["code"] == "deadline_exceeded"
    assert (await complete(http, TIGHT, stream=stream, deadline_ms=20_000)).status_code == 200
