"""HTTP to scheduler and back: uvicorn, the application, a real engine, and an executor that spells out texts.

The executor also checks every KV slot it reads (see `tests/core/fakes.py`), so blocks that a disconnected request kept
or lost would be noticed where they are used next.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import httpx
import openai
import pytest
from tests.core.fakes import FakeExecutor, fingerprint
from tests.server.conftest import TEMPLATE, listening

from pellucid.core.config import SchedulerConfig
from pellucid.core.plan import StepPlan, StepResult
from pellucid.core.scheduler import Scheduler
from pellucid.engine.engine import Engine
from pellucid.engine.local import LocalClient
from pellucid.server import app as app_module
from pellucid.server.app import create_app
from pellucid.server.config import ServedModel, ServerConfig
from pellucid.telemetry.recorder import StepRecorder
from pellucid.text.chat_template import ChatTemplate
from pellucid.text.tokenizer import Tokenizer

TEXT = "今天天气很好 👩‍👩‍👧‍👦 e\u0301 नमस्ते, the theory is there."
LIMITS = SchedulerConfig(
    num_blocks=512, block_size=16, max_context=2048, max_running=64, token_budget=256, eos_token_ids=(2,)
)


class Speller(FakeExecutor):
    """Continues every prompt with the same ids, however the sequence was chunked or preempted. `seconds` a step."""

    def __init__(self, limits: SchedulerConfig, script: list[int]) -> None:
        super().__init__(limits.num_blocks, limits.block_size)
        self.script = script
        self.seconds = 0.0
        self.num_prompt: dict[int, int] = {}

    def launch(self, plan: StepPlan) -> StepResult:
        self.num_prompt |= {new.seq_id: new.num_prompt_tokens for new in plan.new}
        return super().launch(plan)

    def collect(self, ticket: StepResult) -> StepResult:
        time.sleep(self.seconds)
        return ticket

    def _compute(self, seq_id: int, start: int, end: int, samples: bool) -> tuple[int, ...]:
        if not super()._compute(seq_id, start, end, samples):
            return ()
        mirror = self.mirrors[seq_id]
        num_generated = len(mirror.tokens) - 1 - self.num_prompt[seq_id]
        token = mirror.tokens[-1] = self.script[num_generated % len(self.script)]
        mirror.marks[-1] = fingerprint(mirror.marks[-2], token)
        return (token,)


class Stack:
    """A server, its engine and what its executor says."""

    def __init__(self, tokenizer: Tokenizer, limits: SchedulerConfig = LIMITS) -> None:
        self.tokenizer, self.limits = tokenizer, limits
        self.script = [*tokenizer.encode(TEXT), 2]
        self.executor = Speller(limits, self.script)
        self.engine = Engine(Scheduler(limits), self.executor, time.monotonic, recorder=StepRecorder(256))
        self.client = LocalClient(self.engine)
        served = ServedModel("tiny", tokenizer, limits, ChatTemplate(TEMPLATE, tokenizer))
        self.app = create_app(self.client, served, ServerConfig())
        self.url = ""

    async def idle(self) -> None:
        """Wait until nothing is left of any request: no sequence, no block in use."""

        def busy() -> bool:
            stats = self.engine.stats()
            return bool(stats.num_running or stats.num_waiting or stats.blocks_active or stats.blocks_in_flight)

        async with asyncio.timeout(10):
            while busy():
                await asyncio.sleep(0.005)
        stats = self.engine.stats()
        assert stats.blocks_free + stats.blocks_cached == self.limits.num_blocks


@pytest.fixture
async def stack(tokenizer: Tokenizer) -> AsyncIterator[Stack]:
    stack = Stack(tokenizer)
    async with listening(stack.app) as stack.url:
        yield stack


async def stream_text(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[str, dict[str, Any], int]:
    """The text, the usage and the number of generated tokens as the chunks tell them."""
    text, usage, num_tokens, finished = "", {}, 0, 0
    is_chat = "messages" in body
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with http.post(url + path, json=body) as reply:
        assert reply.status == 200, await reply.text()
        async for raw in reply.content:
            line = raw.decode().strip().removeprefix("data: ")
            if not line or line == "[DONE]":
                continue
            chunk = json.loads(line)
            assert "error" not in chunk, chunk
            usage = chunk["usage"] or usage
            for choice in chunk["choices"]:
                text += choice["delta"].get("content", "") if is_chat else choice["text"]
                num_tokens += choice["num_tokens"]
                finished += choice["finish_reason"] is not None
    assert finished == 1
    return text, usage, num_tokens


async def test_64_streams_at_once(stack: Stack) -> None:
    def body(i: int) -> dict[str, Any]:
        words = f"number {i} " + "the theory of " * (i % 9)
        return {"messages": [{"role": "user", "content": words}]} if i % 2 else {"prompt": words, "max_tokens": 500}

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        answers = await asyncio.gather(*[stream_text(http, stack.url, body(i)) for i in range(64)])
    for text, usage, num_tokens in answers:
        assert text == TEXT
        assert usage["completion_tokens"] == num_tokens == len(stack.script)
    assert stack.engine.stats().num_finished == 64
    await stack.idle()


async def test_two_prompts_that_are_alike_share_their_blocks(stack: Stack) -> None:
    async with aiohttp.ClientSession() as http:
        body = {"prompt": "the theory of it " * 40, "max_tokens": 4}
        _, first, _ = await stream_text(http, stack.url, body)
        _, second, _ = await stream_text(http, stack.url, body)
    num_prompt = first["prompt_tokens"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == (num_prompt - 1) // 16 * 16


async def test_n_choices_of_one_prompt_share_its_blocks(stack: Stack) -> None:
    async with httpx.AsyncClient(base_url=stack.url) as http:
        body = {"prompt": "the theory of it " * 40, "n": 4, "max_tokens": 3, "temperature": 1.0}
        usage = (await http.post("/v1/completions", json=body)).json()["usage"]
    stats = stack.engine.stats()
    assert usage["completion_tokens"] == 12
    assert stats.cached_tokens == 3 * ((usage["prompt_tokens"] - 1) // 16 * 16)
    await stack.idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
async def test_hanging_up_frees_everything(tokenizer: Tokenizer, phase: str, stream: bool) -> None:
    limits = SchedulerConfig(
        num_blocks=256, block_size=16, max_context=2048, max_running=2, token_budget=32, eos_token_ids=(2,)
    )
    stack = Stack(tokenizer, limits)
    stack.executor.seconds = 0.01
    long, short = [5 + i % 300 for i in range(1500)], [7]
    prompts = {"queue": [short, short, short], "prefill": [long], "decode": [short]}[phase]
    reached = {
        "queue": lambda s: s.num_waiting == 1 and s.generated_tokens > 2,
        "prefill": lambda s: s.num_running == 1 and s.num_steps > 3 and not s.generated_tokens,
        "decode": lambda s: s.generated_tokens > 3,
    }[phase]
    async with listening(stack.app) as url, aiohttp.ClientSession() as http:

        async def ask(prompt: list[int]) -> None:
            body = {"prompt": prompt, "max_tokens": 400, "ignore_eos": True, "stream": stream}
            async with http.post(url + "/v1/completions", json=body) as reply:
                await reply.read()

        tasks = [asyncio.create_task(ask(prompt)) for prompt in prompts]
        async with asyncio.timeout(10):
            while not reached(stack.engine.stats()):
                await asyncio.sleep(0.002)
        num_generated = stack.engine.stats().generated_tokens
        for task in tasks:
            task.cancel()
        await stack.idle()
        assert stack.engine.stats().num_finished == len(prompts)
        assert stack.engine.stats().generated_tokens < num_generated + 100, "generation went on after the clients left"
        stack.executor.seconds = 0.0
        async with http.post(url + "/v1/completions", json={"prompt": "still there?", "max_tokens": 500}) as reply:
            assert (await reply.json())["choices"][0]["text"] == TEXT, "the server serves on"


async def test_stop_strings_end_the_request_in_the_engine(stack: Stack) -> None:
    stack.executor.seconds = 0.002
    async with aiohttp.ClientSession() as http:
        body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stop": ["天气", "👩‍👩‍👧‍👦 e"]}
        text, usage, _ = await stream_text(http, stack.url, body)
    assert text == "今天"
    await stack.idle()
    assert stack.engine.stats().generated_tokens < usage["completion_tokens"] + 50


async def test_an_engine_that_fails_ends_open_streams_and_turns_health_red(stack: Stack) -> None:
    def fail(_: StepPlan) -> StepResult:
        raise RuntimeError("the device fell off the bus")

    stack.executor.seconds = 0.002
    async with httpx.AsyncClient(base_url=stack.url) as http:
        body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.aiter_lines()
            await anext(lines)
            stack.executor.launch = fail  # type: ignore[method-assign]
            rest = [line async for line in lines if line]
        assert "fell off the bus" in json.loads(rest[-1].removeprefix("data: "))["error"]["message"]
        health = await http.get("/health")
        assert health.status_code == 503
        assert "fell off the bus" in health.json()["error"]["message"]
        assert (await http.post("/v1/completions", json=body)).status_code == 503


async def test_openai_async_client(stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=stack.url + "/v1", api_key="none", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        messages: Any = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
        chat = await client.chat.completions.create(model="tiny", messages=messages, n=2, user="me")
        assert [choice.message.content for choice in chat.choices] == [TEXT, TEXT]
        assert chat.choices[0].finish_reason == "stop"
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 2 * len(stack.script)
        stream = await client.chat.completions.create(
            model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
        assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
        assert chunks[-1].usage is not None
        with pytest.raises(openai.NotFoundError, match="served is: tiny"):
            await client.chat.completions.create(model="gpt-9", messages=messages)
        with pytest.raises(openai.BadRequestError, match="exceeds the available context size") as caught:
            await client.completions.create(model="tiny", prompt=[5] * 3000)
        assert caught.value.code == "context_length_exceeded"
        turn = [*messages, chat.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
        assert (await client.chat.completions.create(model="tiny", messages=turn)).choices[0].message.content == TEXT


async def test_openai_sync_client(stack: Stack) -> None:
    def talk() -> None:
        with openai.OpenAI(base_url=stack.url + "/v1", api_key="none", max_retries=0) as client:
            completion = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=300, temperature=0)
            assert [choice.text for choice in completion.choices] == [TEXT, TEXT]
            stream = client.completions.create(model="tiny", prompt="a", max_tokens=300, stream=True)
            assert "".join(chunk.choices[0].text for chunk in stream) == TEXT
            with client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True
            ) as chat:
                for _ in zip(range(3), chat):
                    pass  # and leave in the middle

    await asyncio.to_thread(talk)
    await stack.idle()


async def test_replies_that_do_not_end_before_a_shutdown_are_told_so(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "GRACE_SECONDS", 0.2)
    stack = Stack(tokenizer)
    stack.executor.seconds = 0.005
    asked = {"prompt": "the", "max_tokens": 1900, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=30) as http:
        async with asyncio.timeout(10), listening(stack.app) as url:
            whole = asyncio.create_task(http.post(url + "/v1/completions", json=asked))
            streamed = asyncio.create_task(http.post(url + "/v1/completions", json=asked | {"stream": True}))
            while stack.engine.stats().num_running < 2:
                await asyncio.sleep(0.005)
        reply = await whole
        assert reply.status_code == 503
        assert "stopped" in reply.json()["error"]["message"]
        events = [line for line in (await streamed).text.splitlines() if line]
        assert "stopped" in json.loads(events[-1].removeprefix("data: "))["error"]["message"], events[-2:]
