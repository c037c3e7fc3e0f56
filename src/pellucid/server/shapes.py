"""The JSON that goes back: completions and chat, whole or in chunks, and the usage that both carry.

The two protocols differ only in shape, so each is one small class with the same two methods; a chunk is one dict and
one JSON encoding. A chunk's choice carries `num_tokens`, how many generated tokens it stands for, so that a client can
count tokens and their times without a tokenizer; with `return_token_ids` it carries the ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from pellucid.server.generation import Piece
from pellucid.server.ledgers import OpenLedger

encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Choice:
    """One choice as far as it has come. It continues prompt number `prompt` of its request; `ledger` is open from the
    moment when it is submitted."""

    index: int
    prompt: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_cached: int = 0
    finish_reason: str | None = None
    ledger: OpenLedger | None = None

    def take(self, piece: Piece) -> None:
        """Count what a piece brought; its text is kept or sent by whoever asked for it."""
        self.token_ids += piece.token_ids
        self.num_cached = piece.num_cached
        self.finish_reason = piece.finish_reason


@dataclass(slots=True)
class Usage:
    """Tokens of a whole request: each prompt counts once, however many choices continue it.

    `max_tokens` is set where what was asked for did not fit and was lowered to it.
    """

    num_prompt: list[int]
    max_tokens: int | None = None

    def of(self, choices: list[Choice]) -> dict[str, Any]:
        """In OpenAI's shape. Cached tokens of a prompt are those that each of its choices found in the cache."""
        num_cached = [min(c.num_cached for c in choices if c.prompt == i) for i in range(len(self.num_prompt))]
        num_output = sum(len(choice.token_ids) for choice in choices)
        usage: dict[str, Any] = {
            "prompt_tokens": sum(self.num_prompt),
            "completion_tokens": num_output,
            "total_tokens": sum(self.num_prompt) + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(num_cached)},
        }
        if self.max_tokens is not None:
            usage["max_tokens"] = self.max_tokens
        return usage


class Shape(Protocol):
    """How a protocol writes a choice. `prompt_ids_in_choice`: where `return_token_ids` puts those of the prompt, in the
    choice or beside the choices (as vLLM does)."""

    object: str
    chunk_object: str
    prompt_ids_in_choice: bool

    def delta(self, text: str, *, first: bool) -> dict[str, Any]:
        """The text of a chunk; `first` on the choice's first one."""
        ...

    def whole(self, text: str) -> dict[str, Any]:
        """The text of a finished choice."""
        ...


class CompletionShape:
    """`/v1/completions`."""

    object = chunk_object = "text_completion"
    prompt_ids_in_choice = True

    def delta(self, text: str, *, first: bool) -> dict[str, Any]:
        return {"text": text}

    def whole(self, text: str) -> dict[str, Any]:
        return {"text": text}


class ChatShape:
    """`/v1/chat/completions`. The role comes with the first token, never before it."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_ids_in_choice = False

    def delta(self, text: str, *, first: bool) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": text} if first else {"content": text}}

    def whole(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every body of one reply begins with. `created` is in Unix seconds."""

    shape: Shape
    id: str
    model: str
    created: int

    def body(self, choices: list[dict[str, Any]], extra: dict[str, Any]) -> bytes:
        """A whole reply; `extra` stands beside the choices."""
        return encode(self._fields(self.shape.object, choices) | extra)

    def event(self, choices: list[dict[str, Any]], extra: dict[str, Any]) -> bytes:
        """One chunk, as a server-sent event."""
        return b"data: " + encode(self._fields(self.shape.chunk_object, choices) | extra) + b"\n\n"

    def _fields(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
