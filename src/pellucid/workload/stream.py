"""What a streamed reply said, and when: server-sent events in, stamped token-bearing chunks out.

Bytes are stamped where they are read; every event completed by the same read carries that read's time. A chunk bears
tokens if the server says so (`token_ids`, Pellucid's `num_tokens`, or a `completion_tokens` that grew), else if it
carries text of any kind: answer, reasoning or tool call. A role-only first chunk, an empty delta, a usage chunk, a
keep-alive comment and `[DONE]` bear none. A stream is complete when it said `[DONE]` or gave a finish reason; one that
ends otherwise is recorded as cut, never as a success.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

Status = str
OK, EMPTY, CUT, MALFORMED, SERVER_ERROR = "ok", "empty", "cut", "malformed", "server-error"


class Chunk(NamedTuple):
    """Tokens that arrived together: when (seconds), and how many (None where the server does not tell)."""

    at: float
    num_tokens: int | None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    num_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    ledger: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_Event).decode


class ReplyStream:
    """Reads one streamed reply. `feed` it what arrives, then call `close` and read the fields."""

    __slots__ = (
        "_buffer",
        "_completion_seen",
        "_data",
        "_event_kind",
        "cached_tokens",
        "chunks",
        "completion_tokens",
        "detail",
        "done_at",
        "finish_reason",
        "first_answer_at",
        "first_event_at",
        "ledger",
        "prompt_tokens",
        "status",
    )

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.first_event_at: float | None = None
        self.first_answer_at: float | None = None
        self.done_at: float | None = None
        self.finish_reason: str | None = None
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.ledger: dict[str, Any] | None = None
        self.status: Status = ""
        self.detail = ""
        self._buffer = b""
        self._data: list[bytes] = []
        self._event_kind = b""
        self._completion_seen = 0

    def feed(self, data: bytes, at: float) -> None:
        """Take bytes as they arrived at time `at`."""
        lines = (self._buffer + data).split(b"\n")
        self._buffer = lines.pop()
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if not line:
                self._dispatch(at)
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
            elif line.startswith(b"event:"):
                self._event_kind = line[6:].strip()

    def close(self) -> Status:
        """Judge the stream at its end and return its status. An event without its closing blank line does not count."""
        if not self.status:
            if self.done_at is None and self.finish_reason is None:
                self._fail(CUT, "the stream ended without [DONE] or a finish reason")
            elif not self.chunks:
                self._fail(EMPTY, "the stream carried no token")
            else:
                self.status = OK
        return self.status

    def _fail(self, status: Status, detail: str) -> None:
        if not self.status:
            self.status, self.detail = status, detail

    def _dispatch(self, at: float) -> None:
        data, kind = b"\n".join(self._data), self._event_kind
        self._data, self._event_kind = [], b""
        if not data or self.done_at is not None:
            return
        if data.strip() == b"[DONE]":
            self.done_at = at
            return
        try:
            event = _decode(data)
        except msgspec.DecodeError as error:
            self._fail(MALFORMED, f"{error}: {data[:120]!r}")
            return
        if event.error is not None or kind == b"error":
            self._fail(SERVER_ERROR, str(event.error or data[:200].decode(errors="replace")))
            return
        self._take(event, at)

    def _take(self, event: _Event, at: float) -> None:
        grown = self._read_usage(event.usage)
        if event.ledger is not None:
            self.ledger = event.ledger
        if not event.choices:
            return
        if self.first_event_at is None:
            self.first_event_at = at
        choice = event.choices[0]
        if choice.finish_reason is not None:
            self.finish_reason = choice.finish_reason
        delta = choice.delta
        answer = choice.text or (delta.content if delta is not None else None)
        thought = delta is not None and (
            delta.reasoning or delta.reasoning_content or delta.tool_calls or delta.function_call
        )
        num_tokens = choice.num_tokens if choice.num_tokens is not None else grown
        if choice.token_ids is not None:
            num_tokens = len(choice.token_ids)
        if num_tokens or (num_tokens is None and (answer or thought)):
            self.chunks.append(Chunk(at, num_tokens))
            if answer and self.first_answer_at is None:
                self.first_answer_at = at

    def _read_usage(self, usage: _Usage | None) -> int | None:
        """Take over usage figures; returns by how much `completion_tokens` grew (None: not told)."""
        if usage is None:
            return None
        if usage.prompt_tokens is not None:
            self.prompt_tokens = usage.prompt_tokens
        if usage.prompt_tokens_details is not None:
            self.cached_tokens = usage.prompt_tokens_details.cached_tokens
        if usage.completion_tokens is None:
            return None
        grown = usage.completion_tokens - self._completion_seen
        self._completion_seen = self.completion_tokens = usage.completion_tokens
        return grown
