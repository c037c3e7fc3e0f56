"""Tenants over HTTP: whose key opens what, what each may ask for, what a refusal says, and what is kept of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.server.conftest import LIMITS, TEMPLATE, MakeApp, in_process, listening
from tests.server.fakes import FakeEngine
from tests.server.test_api import CHAT, error, events
from tests.server.test_end_to_end import Speller

from pellucid.core.config import SchedulerConfig
from pellucid.core.errors import ConfigError, RequestRejected
from pellucid.core.plan import StepPlan, StepResult
from pellucid.core.scheduler import Scheduler
from pellucid.core.tenants import Tenant
from pellucid.engine.engine import Engine
from pellucid.engine.local import LocalClient
from pellucid.server.app import create_app
from pellucid.server.config import ServedModel, ServerConfig
from pellucid.server.isolation import load_secret
from pellucid.server.tenancy import Tenancy, reload_on_hangup
from pellucid.server.tenants import new_key
from pellucid.server.usage import UsageRow, read_usage
from pellucid.text.chat_template import ChatTemplate
from pellucid.text.tokenizer import Tokenizer

OPERATOR, ACME, LAB, LAB_NEW = (new_key() for _ in range(4))
SYSTEM = "The quick brown fox jumps over the lazy dog. " * 3
FILE = f"""
operator.keys = ["{OPERATOR.hash}"]
[public_prefixes]
fox = "{SYSTEM}"
[tenants.acme]
keys = ["{ACME.hash}"]
weight = 2.0
priority_ceiling = -3
public_prefixes = ["fox"]
[tenants.lab]
keys = ["{LAB.hash}", "{LAB_NEW.hash}"]
"""
ASKED = {"prompt": "hi", "max_tokens": 2}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.toml"
    path.write_text(FILE)
    return path


@pytest.fixture
async def http(make_app: MakeApp, path: Path):
    async with in_process(make_app(tenants=path)) as client:
        yield client


async def complete(http: httpx.AsyncClient, key: str = ACME.key, **fields: Any) -> httpx.Response:
    headers = bearer(key) | fields.pop("headers", {})
    return await http.post("/v1/completions", json=ASKED | fields, headers=headers)


async def test_a_key_is_its_tenants(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    for key in (ACME, LAB, LAB_NEW):
        assert (await complete(http, key.key)).status_code == 200
    assert [request.tenant for request in engine.requests] == ["acme", "lab", "lab"]
    assert (await http.post("/v1/chat/completions", json=CHAT, headers=bearer(LAB.key))).status_code == 200
    assert engine.requests[-1].tenant == "lab"


CALLS: list[Callable[[httpx.AsyncClient, dict[str, str]], Awaitable[httpx.Response]]] = [
    lambda http, headers: http.post("/v1/completions", json=ASKED, headers=headers),
    lambda http, headers: http.post("/v1/chat/completions", json=CHAT, headers=headers),
    lambda http, headers: http.post("/tokenize", json={"prompt": "a"}, headers=headers),
    lambda http, headers: http.post("/detokenize", json={"tokens": [1]}, headers=headers),
    lambda http, headers: http.get("/v1/models", headers=headers),
    lambda http, headers: http.get("/v1/models/tiny", headers=headers),
    lambda http, headers: http.get("/metrics", headers=headers),
    lambda http, headers: http.get("/v1/steps", headers=headers),
]


async def test_without_a_known_key_nothing_is_said(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    """Missing, wrong, cut short, somebody's hash: one answer, before the body is looked at."""
    digest = ACME.hash.removeprefix("sha256:")
    wrong = [
        "",
        "x",
        ACME.key[:-1],
        ACME.key + "x",
        ACME.key.upper(),
        ACME.hash,
        digest,
        "acme",
        f"{ACME.key} {LAB.key}",
    ]
    bodies = set()
    for call in CALLS:
        for headers in ({}, *map(bearer, wrong), {"Authorization": ACME.key}, {"Authorization": f"Basic {ACME.key}"}):
            reply = await call(http, headers)
            assert error(reply, 401)["code"] == "invalid_api_key"
            assert reply.headers["www-authenticate"] == "Bearer"
            bodies.add(reply.content)
    reply = await http.post("/v1/completions", content=b"{", headers=bearer("x"))
    assert reply.content in bodies, "the body was read before the key"
    assert len(bodies) == 1
    assert not engine.requests
    assert (await http.get("/health")).status_code == 200


async def test_the_operator_sees_everything_and_generates_nothing(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    metrics = await http.get("/metrics", headers=bearer(OPERATOR.key))
    assert "pellucid_running" in metrics.text
    assert (await http.get("/v1/models", headers=bearer(OPERATOR.key))).status_code == 200
    for call in CALLS[:2]:
        refusal = error(await call(http, bearer(OPERATOR.key)), 403)
        assert (refusal["type"], refusal["code"]) == ("permission_error", "tenant_key_needed")
    assert (await http.get("/v1/steps", headers=bearer(ACME.key))).status_code == 403
    refusal = error(await http.get("/metrics", headers=bearer(ACME.key)), 403)
    assert refusal["code"] == "operator_key_needed"
    assert "/metrics shows all tenants; it needs the operator key" in refusal["message"]
    assert not engine.requests


async def test_an_api_key_beside_tenants_is_one_more(make_app: MakeApp, path: Path, engine: FakeEngine) -> None:
    async with in_process(make_app(tenants=path, api_key="secret")) as http:
        assert (await complete(http, "secret")).status_code == 200
        assert (await http.get("/metrics", headers=bearer("secret"))).status_code == 200
        assert (await complete(http, ACME.key)).status_code == 200
        error(await complete(http, "other"), 401)
        assert [request.tenant for request in engine.requests] == ["default", "acme"]
        assert engine.requests[0].cache_key not in (b"", engine.requests[1].cache_key)
    with pytest.raises(ConfigError, match="has the hash of the key given with --api-key"):
        make_app(tenants=path, api_key=LAB.key)


async def test_without_tenants_there_is_the_default_one(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert (await client.post("/v1/completions", json=ASKED | {"priority": -1000})).status_code == 200
    request = engine.requests[0]
    assert (request.tenant, request.cache_key, request.num_public_blocks) == ("default", b"", 0)
    assert request.priority == -1000


def test_an_application_does_not_forget_its_tenants(engine: FakeEngine, tokenizer: Tokenizer, path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tenants.toml were not read"):
        create_app(engine, ServedModel("tiny", tokenizer, LIMITS), ServerConfig(tenants=path))


async def test_namespaces_are_the_servers_own(http: httpx.AsyncClient, engine: FakeEngine, path: Path) -> None:
    """By tenant, whichever of its keys it brings, and never by what the request says."""
    for key in (ACME, LAB, LAB_NEW):
        await complete(http, key.key)
    acme, lab, also_lab = (request.cache_key for request in engine.requests)
    assert acme != lab == also_lab
    assert b"" not in (acme, lab)
    secret = load_secret(path.parent / "state")
    assert b"acme" not in acme
    assert secret not in (acme, lab)
    for field in ("cache_salt", "cache_key", "tenant"):
        error(await complete(http, **{field: "acme"}), 400)


class Watched(Speller):
    """Remembers how many tokens each step computed."""

    def __init__(self, limits: SchedulerConfig, script: list[int]) -> None:
        super().__init__(limits, script)
        self.steps: list[int] = []

    def launch(self, plan: StepPlan) -> StepResult:
        self.steps.append(plan.num_tokens)
        return super().launch(plan)


@pytest.fixture
def executor(tokenizer: Tokenizer) -> Watched:
    return Watched(LIMITS, [*tokenizer.encode("the theory"), 2])


@pytest.fixture
async def real(executor: Watched, tokenizer: Tokenizer, path: Path):
    """The tenants' server with a real engine behind it."""
    client = LocalClient(Engine(Scheduler(LIMITS), executor, time.monotonic))
    served = ServedModel("tiny", tokenizer, LIMITS, ChatTemplate(TEMPLATE, tokenizer))
    tenancy = Tenancy.of_file(path, served, api_key=None, state_directory=path.parent / "state")
    app = create_app(client, served, ServerConfig(tenants=path), tenancy)
    async with listening(app) as url, httpx.AsyncClient(base_url=url) as http:
        yield http


async def test_a_probe_cannot_tell_what_another_tenant_asked(real: httpx.AsyncClient, executor: Watched) -> None:
    """It takes the very same steps for a prompt that another tenant sent as for one that nobody did."""

    async def ask(key: str, token: int) -> tuple[int, list[int]]:
        executor.steps.clear()
        reply = await complete(real, key, prompt=[token] * 300)
        return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"], list(executor.steps)

    first, again = await ask(ACME.key, 5), await ask(ACME.key, 5)
    assert (first[0], again[0]) == (0, 288)
    assert sum(again[1]) == sum(first[1]) - 288, "the owner itself would see no difference either"
    assert await ask(LAB.key, 5) == await ask(LAB.key, 6) == first
    assert await ask(LAB_NEW.key, 5) == again, "a tenant's keys are one tenant"


async def test_a_public_head_is_shared_by_those_who_may(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    def chat(system: str) -> dict[str, Any]:
        return {"messages": [{"role": "system", "content": system}, *CHAT["messages"]], "max_tokens": 1}

    async def asked(key: str, system: str) -> Any:
        assert (await http.post("/v1/chat/completions", json=chat(system), headers=bearer(key))).status_code == 200
        return engine.requests[-1]

    shared = await asked(ACME.key, SYSTEM)
    head = len(shared.prompt) - 16
    assert shared.num_public_blocks >= 2
    assert head // 16 - 1 <= shared.num_public_blocks <= len(shared.prompt) // 16
    assert len(shared.public_key) == 16
    assert shared.public_key != shared.cache_key
    for key, system in ((LAB.key, SYSTEM), (ACME.key, SYSTEM[1:]), (ACME.key, "short")):
        own = await asked(key, system)
        assert (own.public_key, own.num_public_blocks) == (b"", 0)
    ids = list(shared.prompt[: 16 * shared.num_public_blocks])
    assert (await complete(http, prompt=[ids, [*ids[:-1], 5]])).status_code == 200
    assert [request.num_public_blocks for request in engine.requests[-2:]] == [shared.num_public_blocks, 0]


async def test_tenants_share_the_computed_public_head_and_nothing_behind_it(
    executor: Watched, tokenizer: Tokenizer, path: Path
) -> None:
    path.write_text(FILE + 'public_prefixes = ["fox"]\n')
    client = LocalClient(Engine(Scheduler(LIMITS), executor, time.monotonic))
    served = ServedModel("tiny", tokenizer, LIMITS, ChatTemplate(TEMPLATE, tokenizer))
    tenancy = Tenancy.of_file(path, served, api_key=None, state_directory=path.parent / "state")
    app = create_app(client, served, ServerConfig(tenants=path), tenancy)

    async def cached(key: str, question: str) -> int:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        asked = {"messages": messages, "max_tokens": 1}
        reply = await http.post("/v1/chat/completions", json=asked, headers=bearer(key))
        return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    async with listening(app) as url, httpx.AsyncClient(base_url=url) as http:
        question = "Which animal is lazy, and which one jumps over it? " * 3
        assert await cached(ACME.key, question) == 0
        public = await cached(LAB.key, question)
        own = await cached(ACME.key, question)
        assert 0 < public < own, "the same words of another tenant are as good as not there, but for the public head"
        assert await cached(LAB.key, "What does the fox say? " * 5) == public
        assert await cached(LAB.key, question) == own


async def test_priority_is_honoured_down_to_the_ceiling(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    for priority in (-3, 0, 7):
        assert (await complete(http, priority=priority)).status_code == 200
    assert (await complete(http, LAB.key, priority=-100)).status_code == 200
    assert [request.priority for request in engine.requests] == [-3, 0, 7, -100]
    refusal = error(await complete(http, priority=-4), 400)
    assert refusal["message"] == ("priority is -4; tenant acme may ask for -3 or higher (lower is served first)")
    assert (refusal["param"], refusal["code"]) == ("priority", "priority_above_ceiling")
    error(await complete(http, priority=1.5), 400)
    error(await complete(http, priority=1 << 40), 400)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_reply_says_what_was_predicted(client: httpx.AsyncClient, engine: FakeEngine, stream: bool) -> None:
    for predicted, header in ((None, None), (0.0, "0"), (1.2345, "1234")):
        engine.predicted = predicted
        for n in (1, 3):
            reply = await client.post("/v1/completions", json=ASKED | {"stream": stream, "n": n})
            assert reply.status_code == 200
            assert reply.headers.get("x-pellucid-predicted-ttft-ms") == header
    lines = (await client.get("/metrics")).text.splitlines()
    (count,) = (line for line in lines if line.startswith("pellucid_time_to_first_token_prediction_ratio_count "))
    assert count.endswith(" 4.0")  # nothing is a multiple of a prediction of 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("limit", "status"), [("tenant", 429), ("machine", 503)])
async def test_a_bound_says_whose_it_is_and_when_to_come_back(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool, limit: Any, status: int
) -> None:
    for retry_after, header in ((0.2, "1"), (3.0, "3"), (3.01, "4")):
        engine.fail_after = 0
        engine.failure = RequestRejected("queue_full", "5 of 5 requests wait", retry_after=retry_after, limit=limit)
        reply = await client.post("/v1/completions", json=ASKED | {"stream": stream})
        assert reply.status_code == status
        assert reply.headers["retry-after"] == header
        assert reply.json()["error"] == {
            "message": "5 of 5 requests wait",
            "type": "rate_limit_error" if status == 429 else "service_unavailable",
            "param": None,
            "code": "queue_full",
            "limit": limit,
            "retry_after": retry_after,
        }


async def test_an_openai_client_understands_the_refusal(make_app: MakeApp, engine: FakeEngine) -> None:
    engine.fail_after = 0
    engine.failure = RequestRejected("queue_full", "5 of 5 requests wait", retry_after=2.5, limit="tenant")
    async with listening(make_app()) as url:
        client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.RateLimitError, match="5 of 5 requests wait") as caught:
            await client.completions.create(model="tiny", prompt="hi")
        assert caught.value.response.headers["retry-after"] == "3"


async def test_a_deadline_comes_from_the_body_or_the_header(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    header = "X-Pellucid-Deadline-Ms"
    before = time.monotonic()
    for fields, headers in (
        ({"deadline_ms": 1500}, {}),
        ({}, {header: "1500"}),
        ({"deadline_ms": 1500}, {header: "1500"}),
    ):
        assert (await client.post("/v1/completions", json=ASKED | fields, headers=headers)).status_code == 200
        request = engine.requests[-1]
        assert request.deadline is not None
        assert before + 1.5 <= request.deadline <= request.arrival + 1.5, "it counts from when the body was there"
        assert before <= request.arrival <= time.monotonic(), "not on the engine's clock"
    await client.post("/v1/completions", json=ASKED)
    assert engine.requests[-1].deadline is None
    for value in ("", "0", "-1", "1.5", "soon", "²", "1" * 30, "1" * 5000):
        refusal = error(await client.post("/v1/completions", json=ASKED, headers={header: value.encode()}), 400)
        assert refusal["param"] == header
        assert "a whole number from 1" in refusal["message"]
    for value in (0, -1, 1.5, "1"):
        assert (
            error(await client.post("/v1/completions", json=ASKED | {"deadline_ms": value}), 400)["param"]
            == "deadline_ms"
        )
    reply = await client.post("/v1/completions", json=ASKED | {"deadline_ms": 1}, headers={header: "2"})
    assert "differ; send one of them" in error(reply, 400)["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_that_passes_is_an_error_of_its_own(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    engine.say, engine.ends = lambda request: [], "deadline"
    reply = await client.post("/v1/completions", json=ASKED | {"stream": stream, "deadline_ms": 250})
    refusal = error(reply, 504)
    assert (refusal["type"], refusal["code"]) == ("deadline_error", "deadline_exceeded")
    assert refusal["message"] == "the deadline of 250 ms passed while the request waited; nothing of it was computed"
    assert 'reason="deadline"} 1.0' in (await client.get("/metrics")).text


async def test_a_deadline_that_passes_in_a_stream_is_an_error_event(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """The first choice has begun when the second one runs out of time."""
    engine.say = lambda request: [(5,)] if request.id.endswith("-0") else []
    engine.ends = "deadline"
    reply = await client.post("/v1/completions", json={"prompt": "hi", "n": 2, "stream": True, "deadline_ms": 250})
    assert reply.status_code == 200
    last = reply.text.rstrip().rsplit("\n\n", 1)[1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert '"finish_reason":"length"' not in reply.text


async def test_the_file_is_read_again_while_requests_run(make_app: MakeApp, path: Path, engine: FakeEngine) -> None:
    """A real signal: a bad file changes nothing and says so once, a good one counts from the next request on."""
    app, said = make_app(tenants=path), []
    reload_on_hangup(app.state.tenancy, engine, said.append)
    lab = Tenant("lab")
    try:
        async with listening(app) as url, httpx.AsyncClient(base_url=url) as http:
            engine.hold_after = 3
            running = asyncio.create_task(complete(http, ACME.key, max_tokens=99, stream=True))
            while not engine.open:
                await asyncio.sleep(0.001)

            async def hang_up(text: str) -> str:
                path.write_text(text)
                os.kill(os.getpid(), signal.SIGHUP)
                count = len(said)
                while len(said) == count:
                    await asyncio.sleep(0.001)
                return said[-1]

            for bad, message in (("x", "is not TOML"), (FILE + "maxrunning = 3", "unknown key 'maxrunning'"),
                                 (FILE.replace(SYSTEM, "tiny"), "less than one block")):  # fmt: skip
                line = await hang_up(bad)
                assert line.startswith(str(path)), line
                assert message in line
                assert line.endswith("(the tenants stay as they were)")
                assert "\n" not in line
            assert engine.tenants == []
            assert (await http.get("/v1/models", headers=bearer(ACME.key))).status_code == 200

            line = await hang_up(f'tenants.lab.keys = ["{LAB_NEW.hash}"]')
            assert line == "tenants read again: 1 tenant"
            assert engine.tenants == [lab]
            for gone in (ACME, LAB, OPERATOR):
                assert (await http.get("/v1/models", headers=bearer(gone.key))).status_code == 401
            engine.gate.set()
            reply = await running
            assert events(reply)[-1]["choices"][0]["finish_reason"] == "stop", "a request was dropped"
            assert (await complete(http, LAB_NEW.key)).status_code == 200
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)


async def test_usage_is_kept_by_tenant(make_app: MakeApp, path: Path, engine: FakeEngine) -> None:
    """What streams, stops early or fails is counted as far as it came."""
    async with listening(make_app(tenants=path)) as url, httpx.AsyncClient(base_url=url) as http:
        num_prompt = len(
            (await http.post("/tokenize", json={"prompt": "the theory of"}, headers=bearer(LAB.key))).json()["tokens"]
        )
        engine.cached = 1
        await complete(http, ACME.key, prompt="the theory of", max_tokens=4, n=2)
        await complete(http, ACME.key, prompt="the theory of", max_tokens=4, stream=True)
        await complete(http, LAB.key, prompt="the theory of", max_tokens=99, stop="of")
        engine.fail_after = 2
        await complete(http, LAB.key, prompt="the theory of", max_tokens=99)
        engine.fail_after = 0
        await complete(http, LAB.key)
    today = time.strftime("%Y-%m-%d", time.gmtime())
    rows = read_usage(path.parent / "state" / "usage.sqlite")
    num_new = num_prompt - 1
    assert [row._replace(day=today) for row in rows] == [
        UsageRow(today, "acme", 3, 3 * num_new, 3, 12),
        UsageRow(today, "lab", 2, 2 * num_new, 2, rows[1].output_tokens),
    ]
    assert 2 < rows[1].output_tokens < 22
