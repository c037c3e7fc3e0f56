"""An application over a fake engine, and a real server on a free port."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from tests.server.fakes import FakeEngine
from tests.text.tiny import tiny_byte_level

from pellucid.core.config import SchedulerConfig
from pellucid.server.app import create_app, make_server
from pellucid.server.config import ServedModel, ServerConfig
from pellucid.server.tenancy import Tenancy
from pellucid.text.chat_template import ChatTemplate
from pellucid.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LIMITS = SchedulerConfig(num_blocks=64, block_size=16, max_context=512, token_budget=128, eos_token_ids=(2,))
MakeApp = Callable[..., FastAPI]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return tiny_byte_level()


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeEngine:
    """Says "the theory of 中文 👍🏽 is there" a token at a time, then ends by itself."""
    ids = tokenizer.encode("the theory of 中文 👍🏽 is there")
    return FakeEngine(lambda request: [(i,) for i in ids])


@pytest.fixture
def make_app(engine: FakeEngine, tokenizer: Tokenizer) -> MakeApp:
    def make(*, limits: SchedulerConfig = LIMITS, template: str | None = TEMPLATE, **config: Any) -> FastAPI:
        chat_template = None if template is None else ChatTemplate(template, tokenizer)
        served = ServedModel("tiny", tokenizer, limits, chat_template, created=1_700_000_000)
        told = ServerConfig(**config)
        tenancy = None
        if told.tenants is not None:
            state = told.tenants.parent / "state"
            tenancy = Tenancy.of_file(told.tenants, served, api_key=told.api_key, state_directory=state)
        return create_app(engine, served, told, tenancy)

    return make


@pytest.fixture
async def client(make_app: MakeApp) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application itself, without a socket."""
    async with in_process(make_app()) as http:
        yield http


@asynccontextmanager
async def in_process(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        yield http


@asynccontextmanager
async def listening(app: FastAPI) -> AsyncIterator[str]:
    """The application under uvicorn on a free port; yields its address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = make_server(app, ServerConfig(port=listener.getsockname()[1]))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            if task.done():
                task.result()
            await asyncio.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


@pytest.fixture
async def address(make_app: MakeApp) -> AsyncIterator[str]:
    async with listening(make_app()) as url:
        yield url
