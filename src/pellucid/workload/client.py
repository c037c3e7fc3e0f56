"""One client for any OpenAI-compatible server: sends a prepared request, stamps what comes back.

Connections are reused while they are busy, their number is unlimited, and every new one is counted. The body is encoded
before the request is due, so that at the due time nothing is left but the write. A request never raises: whatever goes
wrong ends in its record, so failures are counted and not lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace, TracebackType
from typing import Any, Literal

import aiohttp
import msgspec

from pellucid.core.errors import PellucidError
from pellucid.workload.metrics import RequestRecord
from pellucid.workload.stream import ReplyStream

Endpoint = Literal["completions", "chat"]
UNFINISHED = "unfinished"
"""Status of a request that was open when the run was interrupted."""

MIN_TOKEN_POOL = 32
_READ_BYTES = 1 << 18
# Under the 5 s after which uvicorn and cpp-httplib end an idle connection, perhaps while a request is written to it.
_KEEPALIVE_SECONDS = 4.0
_SHOWN = 300


class BenchError(PellucidError):
    """A load run that cannot be done as asked."""


class LoadItem(msgspec.Struct, frozen=True, kw_only=True):
    """One request to send. `due` is in seconds from the start (open loop) or None (closed loop: as soon as its turn
    comes). `prompt` is text or token ids. `cohort` tells whether it is measured."""

    index: int
    prompt: str | list[int]
    output_len: int
    due: float | None = None
    group: str = ""
    tenant: str = ""
    session: str = ""
    turn: int | None = None
    expected_cached: int | None = None
    cohort: bool = True


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A server and how to ask it. `extra` is merged into every request's body."""

    url: str
    model: str = ""
    endpoint: Endpoint = "completions"
    api_key: str = ""
    timeout: float = 600.0
    extra: dict[str, Any] = {}

    @property
    def base(self) -> str:
        """The address before `/v1`."""
        return self.url.rstrip("/").removesuffix("/v1")


class LoadClient:
    """Use as an async context manager. Times are seconds since `start_clock`."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.num_connects = 0
        self._origin = time.perf_counter()
        self._encode = msgspec.json.Encoder().encode
        path = "/v1/chat/completions" if target.endpoint == "chat" else "/v1/completions"
        self._post_url = target.base + path
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> LoadClient:
        trace = aiohttp.TraceConfig()
        trace.on_connection_create_end.append(self._connected)
        trace.on_connection_reuseconn.append(_mark_reused)
        headers = {"Content-Type": "application/json"}
        if self.target.api_key:
            headers["Authorization"] = f"Bearer {self.target.api_key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=self.target.timeout),
            read_bufsize=_READ_BYTES,
            headers=headers,
            trace_configs=[trace],
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def _connected(self, session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
        self.num_connects += 1

    def start_clock(self) -> None:
        """Time 0 is now."""
        self._origin = time.perf_counter()

    def now(self) -> float:
        """Seconds since the clock was started."""
        return time.perf_counter() - self._origin

    def encode(self, item: LoadItem) -> bytes:
        """The request body, ready to be written."""
        asked: dict[str, Any] = {"max_tokens": item.output_len}
        if self.target.endpoint == "chat":
            asked["messages"] = [{"role": "user", "content": item.prompt}]
        else:
            asked["prompt"] = item.prompt
        return self._encode(
            {
                "model": self.target.model,
                **asked,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                "ignore_eos": True,
                **self.target.extra,
            }
        )

    async def send(self, item: LoadItem, body: bytes | None = None) -> RequestRecord:
        """Send one request and follow its reply to the end."""
        assert self._session is not None
        body = self.encode(item) if body is None else body
        stream = ReplyStream()
        sent = self.now()
        status, detail = "", ""
        try:
            reply = await self._post(body)
            async with reply:
                if reply.status == 200:
                    async for data in reply.content.iter_any():
                        stream.feed(data, self.now())
                else:
                    status, detail = f"http-{reply.status}", (await reply.text())[:_SHOWN]
        except asyncio.CancelledError:
            status, detail = UNFINISHED, "the run ended first"
        except TimeoutError:
            status, detail = "timeout", f"no end within {self.target.timeout:g} s"
        except (aiohttp.ClientError, OSError) as error:
            status, detail = "connection", f"{type(error).__name__}: {error}"[:_SHOWN]
        if not status:
            status, detail = stream.close(), stream.detail[:_SHOWN]
        return _record(item, sent, status, detail, stream)

    async def _post(self, body: bytes) -> aiohttp.ClientResponse:
        """The reply's head. A kept connection that the server was closing while the request was written to it is not
        the server's failure: such a request (RFC 9112, 9.3.1: no byte of a reply came) goes out again, until a new
        connection carries it."""
        assert self._session is not None
        while True:
            connection: dict[str, bool] = {}
            try:
                return await self._session.post(self._post_url, data=body, trace_request_ctx=connection)
            except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
                if "reused" not in connection:
                    raise

    async def get_json(self, path: str) -> Any:
        """The JSON at a path of the server. Raises BenchError with what came instead."""
        return await self._ask("GET", path, None)

    async def post_json(self, path: str, payload: Any) -> Any:
        """The JSON reply to a JSON question. Raises BenchError with what came instead."""
        return await self._ask("POST", path, self._encode(payload))

    async def _ask(self, method: str, path: str, body: bytes | None) -> Any:
        assert self._session is not None
        url = self.target.base + path
        try:
            async with self._session.request(method, url, data=body) as reply:
                content = await reply.read()
                if reply.status != 200:
                    raise BenchError(f"{method} {url}: HTTP {reply.status} {content[:_SHOWN].decode(errors='replace')}")
                return msgspec.json.decode(content)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise BenchError(f"{method} {url}: {error or type(error).__name__}; is the server running there?") from None
        except msgspec.DecodeError as error:
            raise BenchError(f"{method} {url}: the reply is not JSON ({error})") from None

    async def served_model(self) -> str:
        """The first model that the server lists."""
        listed = await self.get_json("/v1/models")
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise BenchError(f"GET {self.target.base}/v1/models lists no model; name one with --model") from None


async def _mark_reused(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx["reused"] = True


def _record(item: LoadItem, sent: float, status: str, detail: str, stream: ReplyStream) -> RequestRecord:
    return RequestRecord(
        index=item.index,
        scheduled=sent if item.due is None else item.due,
        sent=sent,
        status=status,
        detail=detail,
        requested=item.output_len,
        chunks=stream.chunks,
        received=stream.completion_tokens,
        group=item.group,
        tenant=item.tenant,
        session=item.session,
        turn=item.turn,
        prompt_tokens=stream.prompt_tokens,
        cached_tokens=stream.cached_tokens,
        expected_cached=item.expected_cached,
        first_event=stream.first_event_at,
        first_answer=stream.first_answer_at,
        done=stream.done_at,
        finish_reason=stream.finish_reason,
        ledger=stream.ledger,
    )


Tokenize = Callable[[str], Awaitable[Sequence[int]]]


async def single_token_words(words: Sequence[str], tokenize: Tokenize) -> list[int]:
    """Ids of those words that are one token behind a space. Raises BenchError when too few qualify."""
    together = await tokenize("".join(f" {word}" for word in words))
    if len(together) == len(words):
        ids = set(together)
    else:
        pieces = [await tokenize(f" {word}") for word in words]
        ids = {piece[0] for piece in pieces if len(piece) == 1}
    if len(ids) < MIN_TOKEN_POOL:
        raise BenchError(
            f"only {len(ids)} of {len(words)} common words are single tokens for this server's tokenizer; "
            f"use --prompts text"
        )
    return sorted(ids)


def server_tokenizer(client: LoadClient) -> Tokenize:
    """The target's own `/tokenize`, asked as vLLM and Pellucid (`prompt`) or as llama.cpp (`content`) understand it."""

    async def tokenize(text: str) -> Sequence[int]:
        asked = {"add_special_tokens": False}
        try:
            reply = await client.post_json("/tokenize", {"model": client.target.model, "prompt": text, **asked})
        except BenchError:
            reply = {}
        if "tokens" not in reply:
            reply = await client.post_json("/tokenize", {"content": text, "add_special": False})
        return [int(token) for token in reply["tokens"]]

    return tokenize
