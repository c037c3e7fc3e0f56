"""`/v1/completions` and `/v1/chat/completions`: a body becomes prompts, prompts become choices, choices a reply.

A request with several prompts or with `n` is that many engine requests; those of one prompt share its blocks through
the prefix cache. Both endpoints, streaming and not, end in the same `Reply`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from pellucid.core.errors import RequestRejected
from pellucid.core.request import Request
from pellucid.engine.client import EngineClient
from pellucid.server.config import ServedModel, ServerConfig
from pellucid.server.errors import bad_request, not_ready
from pellucid.server.generation import Piece, generate
from pellucid.server.ledgers import LedgerDesk
from pellucid.server.meter import Meter
from pellucid.server.openai_types import DEADLINE_HEADER, ChatBody, CompletionBody, GenerationBody, parse_prompts
from pellucid.server.reply import Prompt, Reply
from pellucid.server.shapes import ChatShape, Choice, CompletionShape, Envelope, Usage
from pellucid.server.streaming import EventStream, Outlet, WholeReply, until_disconnect
from pellucid.server.tenancy import Tenancy
from pellucid.telemetry.prometheus import ServerMetrics
from pellucid.telemetry.spans import TRACE_HEADERS
from pellucid.text.tokenizer import Tokenizer

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's; a chat without max_tokens gets what fits
CLIENT_CLOSED_REQUEST = 499  # the client does not see it, but metrics do
_LONG_TEXT = 16_384  # characters; tokenizing more than that would be felt by the streams beside it


async def encode_parts(tokenizer: Tokenizer, parts: list[str], *, add_special_tokens: bool = True) -> list[int]:
    """`Tokenizer.encode_parts`; of a long text in a thread, as the tokenizer releases the interpreter lock."""
    if sum(map(len, parts)) < _LONG_TEXT:
        return tokenizer.encode_parts(parts, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode_parts, parts, add_special_tokens=add_special_tokens)


class Call(NamedTuple):
    """One HTTP request for text: whose it is, when it was whole, and which of its fields are ignored."""

    http: HttpRequest
    tenant: str
    arrival: float
    ignored: Sequence[str]


class Completions:
    """The two generating endpoints, over one engine and one model."""

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
        self._engine, self._served, self._config = engine, served, config
        self._metrics, self._tenancy, self._ledgers = metrics, tenancy, ledgers

    async def complete(self, call: Call, body: CompletionBody) -> Response:
        """POST /v1/completions."""
        prompts = []
        for given in parse_prompts(body.prompt):
            ids = await self._encode([given]) if isinstance(given, str) else self._checked(given, "prompt")
            text = given if isinstance(given, str) else self._served.tokenizer.decode(given)
            prompts.append(Prompt(ids, text if body.echo else ""))
        return await self._reply(call, body, prompts)

    async def chat(self, call: Call, body: ChatBody) -> Response:
        """POST /v1/chat/completions."""
        template = self._served.chat_template
        if template is None:
            raise bad_request(f"{self._served.name} has no chat template; use /v1/completions", code="no_chat_template")
        prompt = Prompt(await self._encode(template.render(body.messages)))
        return await self._reply(call, body, [prompt])

    async def _encode(self, parts: list[str]) -> list[int]:
        ids = await encode_parts(self._served.tokenizer, parts)
        if not ids:
            raise bad_request("the prompt is empty; at least one token is needed", param="prompt")
        return ids

    def _checked(self, ids: list[int], param: str) -> list[int]:
        size = self._served.tokenizer.vocab_size
        if ids and max(ids) >= size:
            raise bad_request(f"token id {max(ids)} is outside the vocabulary of {size}", param=param)
        return ids

    def _room_after(self, prompt: Prompt) -> int:
        """Most tokens that can follow the prompt. Raises RequestRejected."""
        try:
            return self._served.limits.max_output_tokens(len(prompt.token_ids))
        except RequestRejected as error:
            self._metrics.count_rejection(error)
            raise

    async def _reply(self, call: Call, body: GenerationBody, prompts: list[Prompt]) -> Response:
        if self._engine.state != "ready":
            raise not_ready(self._engine.state, self._engine.reason)
        if len(prompts) * body.n > self._config.max_choices:
            raise bad_request(
                f"prompts times n is {len(prompts) * body.n}; at most {self._config.max_choices}", param="n"
            )
        self._tenancy.check_priority(call.tenant, body.priority)
        wait = body.deadline_seconds(call.http.headers.get(DEADLINE_HEADER))
        namespaces = [self._tenancy.namespace(call.tenant, prompt.token_ids) for prompt in prompts]
        is_chat = isinstance(body, ChatBody)
        wanted = body.wanted_tokens() or (None if is_chat else DEFAULT_COMPLETION_TOKENS)
        fitting = [self._room_after(prompt) for prompt in prompts]
        lowered = min(fitting) if wanted is not None and wanted > min(fitting) else None
        stops = body.stops()
        self._checked(body.stop_token_ids, "stop_token_ids")
        shape = ChatShape() if is_chat else CompletionShape()
        headers = {"X-Pellucid-Ignored-Fields": ", ".join(call.ignored)} if call.ignored else {}
        if lowered is not None:
            headers["X-Pellucid-Max-Tokens"] = str(lowered)
        trace = {name: value for name in TRACE_HEADERS if (value := call.http.headers.get(name)) is not None}
        envelope = Envelope(shape, call.http.state.request_id, self._served.name, int(time.time()))

        outlet = Outlet()

        def start(choice: Choice) -> AsyncGenerator[Piece, None]:
            fits = fitting[choice.prompt]
            request = Request(
                id=f"{envelope.id}-{choice.index}" if len(prompts) * body.n > 1 else envelope.id,
                prompt=tuple(prompts[choice.prompt].token_ids),
                sampling=body.sampling(max_tokens=min(wanted or fits, fits), choice=choice.index % body.n),
                arrival=time.monotonic(),
                tenant=call.tenant,
                priority=body.priority,
                deadline=None if wait is None else call.arrival + wait,
                **namespaces[choice.prompt]._asdict(),
            )
            choice.ledger = self._ledgers.open(request, call.arrival, outlet, trace=trace)
            meter = Meter(choice.ledger, self._metrics, self._tenancy.usage, headers)
            return generate(self._engine, request, tokenizer=self._served.tokenizer, stops=stops, meter=meter)

        reply = Reply(envelope, body, prompts, Usage([len(prompt.token_ids) for prompt in prompts], lowered), start)
        outlet.ended = lambda now: self._ledgers.replies_ended(reply.ended(now))
        if body.stream:
            return EventStream(reply.stream, headers, outlet)
        content = None
        try:
            content = await until_disconnect(call.http.receive, reply.collect())
        finally:
            if content is None:
                outlet.ended(time.monotonic())
        return Response(status_code=CLIENT_CLOSED_REQUEST) if content is None else WholeReply(content, headers, outlet)
