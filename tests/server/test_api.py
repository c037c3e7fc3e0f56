"""The HTTP surface over a fake engine: shapes, headers, limits, errors."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.conftest import LIMITS, MakeApp, in_process
from tests.server.fakes import FakeEngine

import pellucid
from pellucid.core.config import SchedulerConfig
from pellucid.core.errors import EngineDead, RequestRejected
from pellucid.text.tokenizer import Tokenizer

TEXT = "the theory of 中文 👍🏽 is there"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    """The JSON events of a stream that ended as it should."""
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def error(reply: httpx.Response, status: int) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    body = reply.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert "\n" not in body["message"]
    return body


async def test_completion(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.cached = 1
    reply = await client.post("/v1/completions", json={"model": "tiny", "prompt": "hi", "max_tokens": 100})
    body = reply.json()
    assert body["object"] == "text_completion"
    assert body["id"] == reply.headers["x-request-id"]
    assert body["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 22,
        "total_tokens": 24,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert "x-pellucid-max-tokens" not in reply.headers


async def test_chat(client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    reply = await client.post("/v1/chat/completions", json=CHAT)
    body = reply.json()
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert list(engine.requests[0].prompt) == tokenizer.encode(rendered)
    assert engine.requests[0].sampling.max_tokens == 512 - len(engine.requests[0].prompt)


async def test_defaults_are_openais(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    reply = await client.post("/v1/completions", json={"prompt": "hi"})
    sampling = engine.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (16, 1.0, 1.0, 0)
    assert reply.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_stream(client: httpx.AsyncClient, path: str) -> None:
    is_chat = "chat" in path
    asked = CHAT if is_chat else {"prompt": "hi", "max_tokens": 99}
    reply = await client.post(path, json=asked | {"stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    chunks = events(reply)
    choices = [chunk["choices"][0] for chunk in chunks]
    texts = [choice["delta"].get("content", "") if is_chat else choice["text"] for choice in choices]
    assert "".join(texts) == TEXT
    assert all(texts[:-1]), "a chunk without text"
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert sum(choice["num_tokens"] for choice in choices) == 22
    assert all("usage" not in chunk for chunk in chunks)
    if is_chat:
        assert choices[0]["delta"] == {"role": "assistant", "content": "the"}, "the role comes with the first token"
        assert all("role" not in choice["delta"] for choice in choices[1:])


async def test_stream_usage(client: httpx.AsyncClient) -> None:
    asked = {"prompt": "hi", "max_tokens": 99, "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(await client.post("/v1/completions", json=asked))
    assert [chunk["choices"] for chunk in chunks[-1:]] == [[]]
    assert chunks[-1]["usage"]["completion_tokens"] == 22
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    asked["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(await client.post("/v1/completions", json=asked))
    so_far = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert so_far[0] == 1
    assert so_far == sorted(so_far)
    assert so_far[-1] == 22


async def test_token_ids(client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    asked = {"prompt": "hi", "max_tokens": 99, "return_token_ids": True}
    choice = (await client.post("/v1/completions", json=asked)).json()["choices"][0]
    assert choice["token_ids"] == tokenizer.encode(TEXT)
    assert choice["prompt_token_ids"] == tokenizer.encode("hi")
    chunks = events(await client.post("/v1/completions", json=asked | {"stream": True}))
    ids = [chunk["choices"][0]["token_ids"] for chunk in chunks]
    assert list(chain.from_iterable(ids)) == choice["token_ids"]
    assert len(chunks) == 23, "with ids, every token has its own chunk, and the end one more"
    body = (await client.post("/v1/chat/completions", json=CHAT | {"return_token_ids": True})).json()
    assert body["prompt_token_ids"][0] == 1
    assert body["choices"][0]["token_ids"] == choice["token_ids"]


async def test_several_prompts_and_choices(client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    engine.say = lambda request: [(i,) for i in request.prompt]  # echoes
    engine.cached = 1
    asked = {"prompt": ["the", "theory of"], "n": 2, "best_of": 2, "max_tokens": 50, "seed": 1}
    body = (await client.post("/v1/completions", json=asked)).json()
    assert [choice["text"] for choice in body["choices"]] == ["the", "the", "theory of", "theory of"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    num_prompt = len(tokenizer.encode("the")) + len(tokenizer.encode("theory of"))
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 2, "one of each prompt, however many choices"
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (num_prompt, 2 * num_prompt)
    assert sorted(request.sampling.seed or 0 for request in engine.requests) == [1, 1, 2, 2]
    assert len({request.id for request in engine.requests}) == 4
    chunks = events(await client.post("/v1/completions", json=asked | {"stream": True}))
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert list(texts.values()) == ["the", "the", "theory of", "theory of"]


async def test_prompts_as_ids_and_echo(client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the dog")
    asked = {"prompt": [ids], "max_tokens": 1, "echo": True}
    assert (await client.post("/v1/completions", json=asked)).json()["choices"][0]["text"] == "the dogthe"
    assert list(engine.requests[0].prompt) == ids
    chunks = events(await client.post("/v1/completions", json=asked | {"prompt": "the dog", "stream": True}))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["the dogthe", ""]
    reply = await client.post("/v1/completions", json={"prompt": [10**6]})
    assert "token id 1000000 is outside the vocabulary of 420" in error(reply, 400)["message"]


async def test_special_tokens_in_completions_and_chat(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await client.post("/v1/completions", json={"prompt": "<|im_end|>"})
    await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "<|im_end|>"}]})
    assert list(engine.requests[0].prompt) == [2]
    assert list(engine.requests[1].prompt).count(2) == 1


@pytest.mark.parametrize(
    ("stop", "text"),
    [("of", "the theory "), (["zzz", "ry of"], "the theo"), ("中文 👍🏽 i", "the theory of "), ("the", "")],
)
async def test_stop_strings(client: httpx.AsyncClient, engine: FakeEngine, stop: Any, text: str) -> None:
    asked = {"prompt": "hi", "max_tokens": 99, "stop": stop}
    choice = (await client.post("/v1/completions", json=asked)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    chunks = events(await client.post("/v1/completions", json=asked | {"stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert len(engine.aborted) == 2, "the engine went on after a stop string"


async def test_a_stop_string_that_never_completes_is_given_back(client: httpx.AsyncClient) -> None:
    asked = {"prompt": "hi", "max_tokens": 99, "stop": "there is more"}
    assert (await client.post("/v1/completions", json=asked)).json()["choices"][0]["text"] == TEXT


async def test_a_character_cut_by_max_tokens_is_flushed_once(client: httpx.AsyncClient) -> None:
    for num_tokens, text in ((6, "the theory of �"), (8, "the theory of 中")):
        asked = {"prompt": "hi", "max_tokens": num_tokens, "stream": True}
        chunks = events(await client.post("/v1/completions", json=asked))
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_max_tokens_is_lowered_to_what_fits_and_said(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for stream in (False, True):
        asked = {"prompt": [5] * 500, "max_tokens": 100, "stream": stream}
        asked |= {"stream_options": {"include_usage": True}} if stream else {}
        reply = await client.post("/v1/completions", json=asked)
        usage = events(reply)[-1]["usage"] if stream else reply.json()["usage"]
        assert reply.headers["x-pellucid-max-tokens"] == "12"
        assert (usage["max_tokens"], usage["completion_tokens"]) == (12, 12)
    assert engine.requests[0].sampling.max_tokens == 12


async def test_prompts_that_do_not_fit(make_app: MakeApp) -> None:
    async with in_process(make_app()) as client:
        body = error(await client.post("/v1/completions", json={"prompt": [5] * 512}), 400)
        assert body["code"] == "context_length_exceeded"
        assert "exceeds the available context size" in body["message"]
        assert "512 tokens" in body["message"]
    small_pool = SchedulerConfig(num_blocks=4, block_size=16, max_context=512)
    async with in_process(make_app(limits=small_pool)) as client:
        body = error(await client.post("/v1/completions", json={"prompt": [5] * 64}), 400)
        assert body["code"] == "context_length_exceeded"
        assert "exceeds the available context size" in body["message"]
        assert "64 tokens (4 blocks of 16)" in body["message"]


async def test_headers(client: httpx.AsyncClient) -> None:
    asked = {"prompt": "hi", "user": "u", "metadata": {}, "store": False}
    reply = await client.post(
        "/v1/completions", json=asked, headers={"x-request-id": "theirs", "x-session-affinity": "s"}
    )
    assert reply.headers["x-pellucid-ignored-fields"] == "metadata, store, user"
    assert reply.headers["x-client-request-id"] == "theirs"
    assert reply.headers["x-request-id"].startswith("cmpl-")
    reply = await client.post("/v1/completions", json={})
    assert reply.headers["x-request-id"].startswith("cmpl-"), "errors have an id too"


async def test_unknown_model(client: httpx.AsyncClient) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": []}),
    ):
        answer = error(await client.post(path, json=body | {"model": "gpt-9"}), 404)
        assert (answer["code"], answer["param"]) == ("model_not_found", "model")
        assert answer["message"] == "the model 'gpt-9' is not served here; served is: tiny"
    error(await client.get("/v1/models/gpt-9"), 404)


async def test_models(client: httpx.AsyncClient, make_app: MakeApp) -> None:
    card = {"id": "tiny", "object": "model", "created": 1_700_000_000, "owned_by": "pellucid", "max_model_len": 512}
    assert (await client.get("/v1/models")).json() == {"object": "list", "data": [card]}
    assert (await client.get("/v1/models/tiny")).json() == card
    async with in_process(make_app(served_model_name="org/other")) as renamed:
        assert (await renamed.get("/v1/models/org/other")).json()["id"] == "org/other"
        assert (await renamed.post("/v1/completions", json={"prompt": "a", "model": "org/other"})).status_code == 200
        error(await renamed.post("/v1/completions", json={"prompt": "a", "model": "tiny"}), 404)


async def test_tokenize_and_detokenize(client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    body = {"model": "tiny", "prompt": TEXT, "add_special_tokens": True}
    assert (await client.post("/tokenize", json=body)).json() == {"tokens": ids, "count": len(ids)}
    assert (await client.post("/detokenize", json={"model": "tiny", "tokens": ids})).json() == {"prompt": TEXT}
    assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}
    error(await client.post("/detokenize", json={"tokens": [10**9]}), 400)


async def test_health_follows_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for path in ("/health", "/health/ready", "/health/live"):
        assert (await client.get(path)).json() == {"status": "ready"}
        assert (await client.head(path)).status_code == 200
    engine.state, engine.reason = "starting", "loading weights"
    assert (await client.get("/health/live")).status_code == 200
    for reply in (await client.get("/health"), await client.post("/v1/completions", json={"prompt": "a"})):
        assert error(reply, 503)["message"] == "the engine is starting: loading weights"
        assert int(reply.headers["retry-after"]) >= 1
    engine.state, engine.reason = "dead", "killed by signal 9"
    for path in ("/health", "/health/ready", "/health/live"):
        body = error(await client.get(path), 503)
        assert (body["message"], body["code"]) == ("the engine has stopped: killed by signal 9", "engine_dead")
    error(await client.post("/v1/completions", json={"prompt": "a"}), 503)


async def test_an_engine_that_refuses_has_its_own_status(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.fail_after, engine.failure = 0, RequestRejected("some_limit", "no: 7 is more than 5")
    for stream in (False, True):
        body = error(await client.post("/v1/completions", json={"prompt": "a", "stream": stream}), 400)
        assert (body["message"], body["code"]) == ("no: 7 is more than 5", "some_limit")


async def test_an_engine_that_dies_ends_streams_with_an_error(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.fail_after, engine.failure = 2, EngineDead("killed by signal 9")
    error(await client.post("/v1/completions", json={"prompt": "a"}), 503)
    for n in (1, 3):
        reply = await client.post("/v1/completions", json={"prompt": "a", "stream": True, "n": n})
        assert reply.status_code == 200
        lines = [line for line in reply.text.split("\n\n") if line]
        assert "[DONE]" not in reply.text
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "engine_dead"
        assert reply.text.count('"error"') == 1
    assert not engine.open


async def test_long_texts_are_tokenized_as_short_ones(client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    text = "the theory of it " * 2000
    ids = (await client.post("/tokenize", json={"prompt": text})).json()["tokens"]
    assert ids == tokenizer.encode(text)
    assert f"{len(ids)} tokens" in error(await client.post("/v1/completions", json={"prompt": text}), 400)["message"]


async def test_a_request_that_the_engine_aborts_is_an_error(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.ends = "abort"
    assert error(await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 99}), 503)["code"] == "aborted"


async def test_bugs_are_500_in_the_same_shape(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    def broken(_: Any) -> list[tuple[int, ...]]:
        raise ZeroDivisionError

    engine.say = broken
    for stream in (False, True):
        reply = await client.post("/v1/completions", json={"prompt": "a", "stream": stream})
        assert error(reply, 500)["code"] == "internal_error"
        assert reply.headers["x-request-id"]


async def test_errors_have_openais_shape(client: httpx.AsyncClient, make_app: MakeApp) -> None:
    error(await client.get("/nope"), 404)
    error(await client.get("/v1/completions"), 405)
    error(await client.post("/v1/completions", content=b"{"), 400)
    error(await client.post("/v1/completions", json={"prompt": ""}), 400)
    error(await client.post("/v1/completions", json={"prompt": "a", "n": 1000}), 400)
    for huge in ({"seed": 1 << 63}, {"top_k": 1 << 63}, {"stop_token_ids": [420]}, {"stop_token_ids": [1 << 40]}):
        error(await client.post("/v1/completions", json={"prompt": "a", **huge}), 400)
    error(await client.post("/v1/chat/completions", json={"messages": []}), 400)
    async with in_process(make_app(template=None)) as without:
        assert error(await without.post("/v1/chat/completions", json=CHAT), 400)["code"] == "no_chat_template"
    async with in_process(make_app(max_body_bytes=100)) as small:
        assert error(await small.post("/v1/completions", json={"prompt": "a" * 200}), 413)["code"] == "body_too_large"


async def test_api_key(make_app: MakeApp) -> None:
    async with in_process(make_app(api_key="secret")) as client:
        for headers in (
            {},
            {"Authorization": "Bearer "},
            {"Authorization": "Bearer other"},
            {"Authorization": "Basic secret"},
        ):
            for call in (
                client.post("/v1/completions", json={"prompt": "a"}, headers=headers),
                client.get("/v1/models", headers=headers),
                client.get("/metrics", headers=headers),
                client.post("/tokenize", json={"prompt": "a"}, headers=headers),
            ):
                assert error(await call, 401)["code"] == "invalid_api_key"
        good = {"Authorization": "Bearer secret"}
        assert (await client.post("/v1/completions", json={"prompt": "a"}, headers=good)).status_code == 200
        assert (await client.get("/metrics", headers=good)).status_code == 200
        assert (await client.get("/health")).status_code == 200


async def test_an_empty_key_is_no_obstacle_where_none_is_asked(client: httpx.AsyncClient) -> None:
    reply = await client.post("/v1/completions", json={"prompt": "a"}, headers={"Authorization": "Bearer "})
    assert reply.status_code == 200


async def test_metrics(client: httpx.AsyncClient) -> None:
    await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 99})
    await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 99, "stream": True, "stop": "of"})
    await client.post("/v1/completions", json={})
    reply = await client.get("/metrics")
    lines = dict(line.rsplit(" ", 1) for line in reply.text.splitlines() if not line.startswith("#"))
    assert lines['pellucid_http_requests_total{route="/v1/completions",status="200"}'] == "2.0"
    assert lines['pellucid_http_requests_total{route="/v1/completions",status="400"}'] == "1.0"
    assert lines['pellucid_choices_finished_total{reason="stop"}'] == "2.0"
    assert lines["pellucid_time_to_first_token_seconds_count"] == "2.0"
    assert lines["pellucid_inter_token_latency_seconds_count"] == "24.0"  # 22 + 4 tokens, less the first of each
    assert lines["pellucid_e2e_seconds_count"] == "2.0"
    assert lines['pellucid_blocks{state="free",tier="device"}'] == "7.0"
    assert lines['pellucid_tokens_total{source="output",tenant="default"}'] == "26.0"
    assert "pellucid_generated_tokens_total" in lines
    assert not [name for name in lines if ":" in name]
    assert (await client.head("/metrics")).status_code == 200


async def test_the_schema_documents_bodies_and_errors(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    completions = document["paths"]["/v1/completions"]["post"]
    assert {"200", "400", "401", "404", "413", "503"} <= set(completions["responses"])
    reference = completions["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    properties = document["components"]["schemas"][reference.rsplit("/", 1)[1]]["properties"]
    assert {"prompt", "max_tokens", "temperature", "stop", "stream"} <= set(properties)
    text = json.dumps(document)
    for target in {part.split('"')[0] for part in text.split('"$ref": "#/components/schemas/')[1:]}:
        assert target in document["components"]["schemas"]


async def test_the_application_closes_its_engine(make_app: MakeApp, engine: FakeEngine) -> None:
    app = make_app()
    async with app.router.lifespan_context(app):
        assert not engine.closed
    assert engine.closed


async def test_hanging_up_aborts_every_choice(make_app: MakeApp, engine: FakeEngine) -> None:
    """Seen from ASGI: the client disconnects while nothing has been sent."""
    engine.hold_after = 0
    for stream in (False, True):
        body = json.dumps({"prompt": "a", "n": 3, "stream": stream}).encode()
        inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        inbox.put_nowait({"type": "http.request", "body": body, "more_body": False})
        sent: list[dict[str, Any]] = []

        async def send(message: Any, sent: list[dict[str, Any]] = sent) -> None:
            sent.append(message)

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": "/v1/completions", "raw_path": b"", "query_string": b"", "root_path": "", "headers": [],
            "client": None, "server": None,
        }  # fmt: skip
        task = asyncio.create_task(make_app()(scope, inbox.get, send))
        while len(engine.open) < 3:
            await asyncio.sleep(0.001)
        inbox.put_nowait({"type": "http.disconnect"})
        await asyncio.wait_for(task, 5)
        assert not engine.open
    assert len(engine.aborted) == 6


def test_the_server_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, pellucid.server.app\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'gguf', 'huggingface_hub') if m in sys.modules])"
    )
    source = str(Path(pellucid.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": source}
    )
    assert done.stdout.strip() == "[]"


def test_limits_are_the_schedulers_own() -> None:
    assert LIMITS.max_output_tokens(500) == 12
