"""The bodies that clients send, typed. Which other fields exist, and what becomes of them, is in `fields.py`."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pellucid.core.request import SamplingParams
from pellucid.server.errors import bad_request
from pellucid.text.chat_template import ROLES

MAX_STOPS = 16
DEADLINE_HEADER = "X-Pellucid-Deadline-Ms"
_MAX_TOKEN_ID = (1 << 31) - 1
_TOKEN_ID = {"type": "integer", "minimum": 0, "maximum": _MAX_TOKEN_ID}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        {"type": "array", "items": _TOKEN_ID, "minItems": 1},
        {"type": "array", "items": {"type": "array", "items": _TOKEN_ID, "minItems": 1}, "minItems": 1},
    ]
}
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_MESSAGE_SCHEMA = {
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]},
    },
    "required": ["role", "content"],
}
_MAX_INT = 1 << 62  # what still fits a 64-bit integer after a small addition
_MAX_PRIORITY = 1 << 31
_MAX_DEADLINE_MS = 7 * 24 * 3600 * 1000
Count = Annotated[int, Meta(ge=1)]
Prompt = Annotated[Any, Meta(extra_json_schema=_PROMPT_SCHEMA)]  # a union of lists, which msgspec cannot check
Message = Annotated[dict[str, Any], Meta(extra_json_schema=_MESSAGE_SCHEMA)]
TokenIds = list[Annotated[int, Meta(ge=0, le=_MAX_TOKEN_ID)]]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`include_usage`: a last chunk with the usage. `continuous_usage_stats`: also the usage so far in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """What completions and chat have in common."""

    model: str | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=_MAX_INT)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    stop: str | list[str] = []
    stop_token_ids: TokenIds = []
    seed: Annotated[int, Meta(ge=-_MAX_INT, le=_MAX_INT)] | None = None
    ignore_eos: bool = False
    n: Count = 1
    priority: Annotated[int, Meta(ge=-_MAX_PRIORITY, le=_MAX_PRIORITY)] = 0
    deadline_ms: Annotated[int, Meta(ge=1, le=_MAX_DEADLINE_MS)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    include_ledger: bool = False

    def wanted_tokens(self) -> int | None:
        """Output tokens asked for; None where the request leaves it open."""
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise bad_request("max_tokens and max_completion_tokens differ; send one of them", param="max_tokens")
        return self.max_tokens or self.max_completion_tokens

    def deadline_seconds(self, header: str | None) -> float | None:
        """Seconds from its arrival within which the request is to be begun; None where it may wait for ever. `header`
        is the value of X-Pellucid-Deadline-Ms, which says the same as the field `deadline_ms`."""
        if header is None:
            return None if self.deadline_ms is None else self.deadline_ms / 1000
        if not re.fullmatch("[0-9]{1,9}", header) or not 1 <= int(header) <= _MAX_DEADLINE_MS:
            raise bad_request(
                f"{DEADLINE_HEADER} is {header[:40]!r}; it must be a whole number from 1 to {_MAX_DEADLINE_MS}",
                param=DEADLINE_HEADER,
            )
        if self.deadline_ms not in (None, int(header)):
            raise bad_request(f"deadline_ms and {DEADLINE_HEADER} differ; send one of them", param="deadline_ms")
        return int(header) / 1000

    def stops(self) -> list[str]:
        """The stop strings, checked."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        if len(stops) > MAX_STOPS or "" in stops:
            raise bad_request(f"stop must be at most {MAX_STOPS} strings, none of them empty", param="stop")
        return stops

    def sampling(self, *, max_tokens: int, choice: int) -> SamplingParams:
        """How choice number `choice` of a prompt is sampled: with a seed, each choice has its own."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            min_p=self.min_p,
            seed=None if self.seed is None else self.seed + choice,
            ignore_eos=self.ignore_eos,
            stop_token_ids=tuple(self.stop_token_ids),
        )

    def check(self) -> None:
        """What the types alone do not say. Raises ApiError."""
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options needs stream: true", param="stream_options")


class CompletionBody(GenerationBody, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """POST /v1/completions."""

    prompt: Prompt
    echo: bool = False
    best_of: Count | None = None

    def check(self) -> None:
        GenerationBody.check(self)
        if self.best_of is not None and self.best_of != self.n:
            raise bad_request(
                f"best_of is {self.best_of}; only best_of equal to n ({self.n}) is supported", param="best_of"
            )


class ChatBody(GenerationBody, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """POST /tokenize."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """POST /detokenize."""

    tokens: TokenIds
    model: str | None = None


def parse_prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of a completion, each a text or token ids: from one string, strings, ids, or lists of ids."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(entry, str) for entry in prompt):
            return list(prompt)
        if _are_ids(prompt):
            return [prompt]
        if all(isinstance(entry, list) and _are_ids(entry) for entry in prompt):
            return list(prompt)
    raise bad_request(
        "prompt must be a string, a list of strings, a list of token ids or a list of such lists, and not empty",
        param="prompt",
    )


def _are_ids(entries: list[Any]) -> bool:
    return bool(entries) and all(type(entry) is int and entry >= 0 for entry in entries)
