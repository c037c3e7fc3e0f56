"""The HTTP application: routes, keys, request ids, errors. What generates text is in `completions.py`.

The server process imports neither torch nor transformers: it knows the engine only by `EngineClient` and the model only
by its text and its limits. Bodies are read and typed by hand (`fields.py`), so that every refusal is one clear line in
OpenAI's shape; the OpenAPI schema is made from the same types.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import Any, TypeVar

import msgspec
import uvicorn
from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pellucid import __version__
from pellucid.core.errors import ConfigError, PellucidError
from pellucid.engine.client import EngineClient
from pellucid.server.access import require_key, require_operator, require_tenant
from pellucid.server.completions import Call, Completions, encode_parts
from pellucid.server.config import ServedModel, ServerConfig
from pellucid.server.errors import ApiError, as_api_error, bad_request, not_ready
from pellucid.server.fields import parse_body
from pellucid.server.ledgers import LedgerDesk
from pellucid.server.openai_types import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from pellucid.server.ops.document import Subject
from pellucid.server.ops.live import LiveFeed
from pellucid.server.ops.routes import OpsRoutes
from pellucid.server.schema import openapi, request_body, responses
from pellucid.server.tenancy import Tenancy
from pellucid.server.wire import EagerProtocol
from pellucid.telemetry.explanation import explain, redacted
from pellucid.telemetry.ledger_json import all_fields
from pellucid.telemetry.machine_use import MachineUse
from pellucid.telemetry.prometheus import CONTENT_TYPE, ServerMetrics
from pellucid.telemetry.spans import RequestSpans

log = logging.getLogger("pellucid.server")
MOST_STEPS = 100_000
GRACE_SECONDS = 5
_ID_PREFIXES = {"/v1/completions": "cmpl-", "/v1/chat/completions": "chatcmpl-"}
Body = TypeVar("Body", CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)
Handler = Callable[[HttpRequest], Awaitable[Response]]


def create_app(
    engine: EngineClient,
    served: ServedModel,
    config: ServerConfig,
    tenancy: Tenancy | None = None,
    *,
    machine: MachineUse | None = None,
    spans: RequestSpans | None = None,
) -> FastAPI:
    """The application. It closes `engine` and `spans` when it shuts down. `tenancy` is needed where `config` names a
    tenants file. `app.state` has `metrics`, its ServerMetrics, `tenancy`, `ledgers`, its LedgerDesk, and `feed`, its
    LiveFeed.

    `machine` counts what the steps use of the machine; `spans` sends a trace of each request.
    """
    if tenancy is None:
        if config.tenants is not None:
            raise ConfigError(f"the tenants of {config.tenants} were not read; give create_app a Tenancy.of_file")
        tenancy = Tenancy.single(config.api_key)
    if config.served_model_name is not None:
        served = replace(served, name=config.served_model_name)
    metrics = ServerMetrics(
        lambda: asdict(engine.stats()),
        machine=machine,
        info={"version": __version__, "model": served.name},
        vllm_model=served.name if config.metrics_compat == "vllm" else None,
    )
    engine.on_steps(metrics.steps)
    decode = served.tokenizer.decode if config.show_text else None
    ledgers = LedgerDesk(engine, decode)
    ledgers.listeners.append(lambda ended: metrics.ended(ended.record))
    if spans is not None:
        ledgers.listeners.append(lambda ended: spans.send(ended.record, ended.trace))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with tenancy.keeping_usage():
            yield
            await engine.close()
            ledgers.close()
        if spans is not None:
            await asyncio.to_thread(spans.close)

    app = FastAPI(title="Pellucid", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.metrics = metrics
    app.state.tenancy = tenancy
    app.state.ledgers = ledgers
    app.state.engine = engine
    subject = Subject(served.name, __version__, served.limits, machine, decode)
    app.state.feed = LiveFeed(engine, subject, metrics.recent)
    app.add_middleware(_Envelope, metrics=metrics)
    for kind in (PellucidError, HTTPException):
        app.add_exception_handler(kind, _answer_error)
    _Routes(engine, served, config, metrics=metrics, tenancy=tenancy, ledgers=ledgers).add_to(app)
    if config.ops_page == "on":
        OpsRoutes(app.state.feed).add_to(app)
    app.openapi = lambda: openapi(app)  # type: ignore[method-assign]
    return app


def make_server(app: FastAPI, config: ServerConfig) -> uvicorn.Server:
    """A uvicorn server for the application; `run()` or `await serve()` it. At shutdown open replies get `GRACE_SECONDS`
    to end; then the engine is stopped, and those still open end as when it dies, with an error that says so. The live
    stream, which has no end of its own, is ended at once."""
    return _Server(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            http=EagerProtocol,
            loop="uvloop",
            ws="none",
            access_log=False,
            log_level="warning",
            timeout_graceful_shutdown=2 * GRACE_SECONDS,  # uvicorn's cancels, and the client sees no reason
        )
    )


class _Server(uvicorn.Server):
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state = self.config.app.state  # type: ignore[union-attr]
        state.feed.close()
        stopping: list[asyncio.Task[None]] = []
        timer = asyncio.get_running_loop().call_later(
            GRACE_SECONDS, lambda: stopping.append(asyncio.create_task(state.engine.close()))
        )
        await super().shutdown(sockets)
        timer.cancel()
        await asyncio.gather(*stopping)


class _Routes:
    """The endpoints, each one method."""

    def __init__(
        self,
        engine: EngineClient,
        served: ServedModel,
        config: ServerConfig,
        *,
        metrics: ServerMetrics,
        tenancy: Tenancy,
        ledgers: LedgerDesk,
    ) -> None:
        self._engine, self._served, self._config, self._metrics = engine, served, config, metrics
        self._ledgers = ledgers
        self._completions = Completions(engine, served, config, metrics=metrics, tenancy=tenancy, ledgers=ledgers)

    def add_to(self, app: FastAPI) -> None:
        """Declare every route, with GET answered to HEAD as well."""
        for path, body, handler in (
            ("/v1/completions", CompletionBody, self.complete),
            ("/v1/chat/completions", ChatBody, self.chat),
            ("/tokenize", TokenizeBody, self.tokenize),
            ("/detokenize", DetokenizeBody, self.detokenize),
        ):
            app.add_api_route(
                path,
                handler,
                methods=["POST"],
                responses=responses(streams=body in (CompletionBody, ChatBody)),
                openapi_extra=request_body(body),
                summary=handler.__doc__,
                description="",
            )
        for path, answer in (
            ("/v1/models", self.models),
            ("/v1/models/{model:path}", self.model),
            ("/v1/requests/{request_id}/ledger", self.ledger),
            ("/health/live", self.live),
            ("/health/ready", self.ready),
            ("/health", self.ready),
            ("/metrics", self.metrics),
            ("/v1/steps", self.steps),
        ):
            app.add_api_route(
                path, answer, methods=["GET"], responses=responses(metrics=path == "/metrics"), summary=answer.__doc__
            )
            app.add_api_route(path, answer, methods=["HEAD"], include_in_schema=False)

    async def complete(self, http: HttpRequest) -> Response:
        """Complete one or more prompts."""
        tenant = require_tenant(http)
        body, ignored = await self._body(http, CompletionBody)
        return await self._completions.complete(Call(http, tenant, http.state.arrival, ignored), body)

    async def chat(self, http: HttpRequest) -> Response:
        """Continue a conversation."""
        tenant = require_tenant(http)
        body, ignored = await self._body(http, ChatBody)
        return await self._completions.chat(Call(http, tenant, http.state.arrival, ignored), body)

    async def tokenize(self, http: HttpRequest) -> Response:
        """Token ids of a text."""
        require_key(http)
        body, _ = await self._body(http, TokenizeBody)
        ids = await encode_parts(self._served.tokenizer, [body.prompt], add_special_tokens=body.add_special_tokens)
        return _json({"tokens": ids, "count": len(ids)})

    async def detokenize(self, http: HttpRequest) -> Response:
        """The text of token ids."""
        require_key(http)
        body, _ = await self._body(http, DetokenizeBody)
        size = self._served.tokenizer.vocab_size
        if body.tokens and max(body.tokens) >= size:
            raise bad_request(f"token id {max(body.tokens)} is outside the vocabulary of {size}", param="tokens")
        return _json({"prompt": self._served.tokenizer.decode(body.tokens)})

    async def models(self, http: HttpRequest) -> Response:
        """The models served here."""
        require_key(http)
        return _json({"object": "list", "data": [self._model_card()]})

    async def model(self, http: HttpRequest, model: str) -> Response:
        """One model."""
        require_key(http)
        self._check_model(model)
        return _json(self._model_card())

    async def ledger(self, http: HttpRequest, request_id: str) -> Response:
        """Where the time of a request went: for its own tenant, or the operator."""
        caller = require_key(http)
        found = await self._ledgers.find(request_id)
        if found is None or not caller.may_see(found.tenant):
            opened = self._ledgers.tenant_of_open(request_id)
            if opened is not None and caller.may_see(opened):
                raise ApiError(
                    409,
                    f"{request_id} is still being answered; its ledger closes with its last byte",
                    code="still_open",
                )
            raise ApiError(404, f"there is no ledger of a request {request_id}", code="request_not_found")
        report = found.ledger if caller.is_operator else redacted(found.ledger, found.tenant)
        fields = {"id": found.id, "tenant": found.tenant, "finished_at": found.finished_at, "reason": found.reason}
        return _json(fields | {"explanation": explain(report), "ledger": all_fields(report)})

    async def live(self, http: HttpRequest) -> Response:
        """200 while restarting would not help; 503 once the engine has stopped."""
        return self._health(alive=self._engine.state != "dead")

    async def ready(self, http: HttpRequest) -> Response:
        """200 when requests can be served, else 503 with the reason."""
        return self._health(alive=self._engine.state == "ready")

    async def metrics(self, http: HttpRequest) -> Response:
        """Prometheus metrics."""
        require_operator(http)
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)

    async def steps(self, http: HttpRequest, last: str = "100") -> Response:
        """The last steps of the engine: what was planned, predicted and measured, and who was in each."""
        require_operator(http)
        if not last.isdecimal() or not 1 <= int(last) <= MOST_STEPS:
            raise bad_request(f"last is {last!r}; it must be a number of steps in [1, {MOST_STEPS}]", param="last")
        records = await self._engine.last_steps(int(last))
        # Thousands of records take a while to write; streams beside them should not wait for it.
        return await asyncio.to_thread(lambda: _json({"object": "list", "data": [r.to_json() for r in records]}))

    def _health(self, *, alive: bool) -> Response:
        state, reason = self._engine.state, self._engine.reason
        if alive:
            return _json({"status": state})
        return not_ready(state, reason).response()

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._served.name,
            "object": "model",
            "created": self._served.created,
            "owned_by": "pellucid",
            "max_model_len": self._served.limits.max_length,
        }

    async def _body(self, http: HttpRequest, kind: type[Body]) -> tuple[Body, Sequence[str]]:
        """The checked body of a request, and the harmless fields it ignored."""
        body, ignored = parse_body(await self._read(http), kind)
        if isinstance(body, CompletionBody | ChatBody):
            body.check()
        if body.model is not None:
            self._check_model(body.model)
        return body, ignored

    async def _read(self, http: HttpRequest) -> bytes:
        """The whole body; `http.state.arrival` is when it was there."""
        limit = self._config.max_body_bytes
        data = bytearray()
        async for chunk in http.stream():
            data += chunk
            if len(data) > limit:
                raise ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
        http.state.arrival = time.monotonic()
        return bytes(data)

    def _check_model(self, name: str) -> None:
        if name != self._served.name:
            message = f"the model {name!r} is not served here; served is: {self._served.name}"
            raise ApiError(404, message, code="model_not_found", param="model")


class _Envelope:
    """Around every request: gives it an id of ours, puts the common headers on its reply, counts the reply, and turns
    what nobody caught into a 500.

    The client's own `x-request-id` is echoed under another name: two clients may use the same one.
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _ID_PREFIXES.get(scope["path"], "req-") + uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        theirs = Headers(scope=scope).get("x-request-id")
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                if theirs:
                    headers["X-Client-Request-Id"] = theirs
                self._metrics.count_reply(getattr(scope.get("route"), "path", "other"), message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except ClientDisconnect:
            log.debug("%s: the client left before its body was complete", request_id)
        except Exception as error:
            log.exception("%s: %s %s failed", request_id, scope["method"], scope["path"])
            if started:
                raise
            await as_api_error(error).response()(scope, receive, send_with_headers)


async def _answer_error(http: HttpRequest, error: Exception) -> Response:
    if isinstance(error, HTTPException):  # of the router: no such path, or not with this method
        error = ApiError(error.status_code, f"{error.detail}: {http.method} {http.url.path}", headers=error.headers)
    return as_api_error(error).response()


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
