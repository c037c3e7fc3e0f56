"""Every request field there is, in one table, and what becomes of it.

A field is *honoured* (a field of the body's type in `openai_types.py`), *harmless* (ignored, and named in the reply's
`X-Pellucid-Ignored-Fields`), or *refused* by name. Many clients spell out the defaults of fields they do not use, so a
refused field is accepted with a value that asks for nothing, and null means the same as leaving a field out.
"""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from pellucid.server.errors import bad_request
from pellucid.server.openai_types import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

Fate = Literal["harmless", "refused"]
Body = TypeVar("Body", CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)


class Field(NamedTuple):
    """A field that is not honoured. `neutral` are the values that ask for nothing."""

    name: str
    fate: Fate
    neutral: tuple[Any, ...] = ()


FIELDS: tuple[Field, ...] = (
    Field("user", "harmless"),
    Field("store", "harmless"),
    Field("metadata", "harmless"),
    Field("service_tier", "harmless"),
    Field("safety_identifier", "harmless"),
    Field("prompt_cache_key", "harmless"),
    Field("prompt_cache_retention", "harmless"),
    Field("parallel_tool_calls", "harmless"),
    # OpenAI's
    Field("logprobs", "refused", (False,)),
    Field("top_logprobs", "refused", (0,)),
    Field("presence_penalty", "refused", (0,)),
    Field("frequency_penalty", "refused", (0,)),
    Field("logit_bias", "refused", ({},)),
    Field("suffix", "refused", ("",)),
    Field("tools", "refused", ([],)),
    Field("tool_choice", "refused", ("none", "auto")),
    Field("functions", "refused", ([],)),
    Field("function_call", "refused", ("none", "auto")),
    Field("response_format", "refused", ({"type": "text"},)),
    Field("modalities", "refused", (["text"],)),
    Field("audio", "refused"),
    Field("prediction", "refused"),
    Field("reasoning_effort", "refused"),
    Field("verbosity", "refused", ("medium",)),
    Field("web_search_options", "refused"),
    # what vLLM and others add
    Field("repetition_penalty", "refused", (1,)),
    Field("length_penalty", "refused", (1,)),
    Field("typical_p", "refused", (1,)),
    Field("use_beam_search", "refused", (False,)),
    Field("early_stopping", "refused", (False,)),
    Field("min_tokens", "refused", (0,)),
    Field("prompt_logprobs", "refused"),
    Field("skip_special_tokens", "refused", (True,)),
    Field("spaces_between_special_tokens", "refused", (True,)),
    Field("include_stop_str_in_output", "refused", (False,)),
    Field("add_generation_prompt", "refused", (True,)),
    Field("continue_final_message", "refused", (False,)),
    Field("chat_template", "refused"),
    Field("chat_template_kwargs", "refused", ({},)),
    Field("documents", "refused", ([],)),
    Field("truncate_prompt_tokens", "refused"),
    Field("allowed_token_ids", "refused"),
    Field("bad_words", "refused", ([],)),
    Field("logits_processors", "refused", ([],)),
    Field("structured_outputs", "refused"),
    Field("guided_json", "refused"),
    Field("guided_regex", "refused"),
    Field("guided_choice", "refused"),
    Field("guided_grammar", "refused"),
    Field("cache_salt", "refused"),
)
_BY_NAME = {field.name: field for field in FIELDS}
_MESSAGE_FIELDS: dict[str, Field] = {
    field.name: field
    for field in (
        Field("name", "harmless"),
        Field("tool_calls", "refused", ([],)),
        Field("annotations", "refused", ([],)),
        Field("tool_call_id", "refused"),
        Field("function_call", "refused"),
        Field("refusal", "refused"),
        Field("audio", "refused"),
        Field("reasoning_content", "refused", ("",)),
    )
}
_VALIDATION = re.compile(r"(?P<what>.*?)(?: - at `(?:key )?(?:in )?\$\.?(?P<where>[^`]*)`)?$", re.DOTALL)


def parse_body(raw: bytes, kind: type[Body]) -> tuple[Body, list[str]]:
    """The typed body in `raw`, and the names of the harmless fields it ignored. Raises ApiError (400) with one line
    naming the field at fault."""
    try:
        fields = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise bad_request("the body must be a JSON object", code="invalid_json")
    honoured = set(kind.__struct_fields__)
    ignored: list[str] = []
    given = _without_nulls(fields)
    kept = {
        name: _without_nulls(value) if isinstance(value, dict) else value
        for name, value in given.items()
        if name in honoured
    }
    for name, value in given.items():
        if name not in honoured:
            _judge(name, value, _BY_NAME, name, ignored)
    if kind is ChatBody:
        _judge_messages(kept.get("messages"), ignored)
    try:
        return msgspec.convert(kept, kind), sorted(ignored)
    except msgspec.ValidationError as error:
        raise _invalid(error) from None


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _judge(name: str, value: Any, table: dict[str, Field], shown: str, ignored: list[str]) -> None:
    """Accept, ignore or refuse a field that is not honoured."""
    field = table.get(name)
    if field is None:
        raise bad_request(
            f"{shown} is not a field that this server knows; leave it out", param=shown, code="unknown_field"
        )
    if field.fate == "harmless":
        if shown not in ignored:
            ignored.append(shown)
    elif not any(_same(value, neutral) for neutral in field.neutral):
        accepted = " or ".join(msgspec.json.encode(neutral).decode() for neutral in field.neutral)
        instead = f"leave it out or send {accepted}" if accepted else "leave it out"
        raise bad_request(f"{shown} is not supported; {instead}", param=shown, code="unsupported_field")


def _same(value: Any, neutral: Any) -> bool:
    """Equality that tells false from 0, and 0 from false."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _judge_messages(messages: Any, ignored: list[str]) -> None:
    """Judge what messages hold beside `role` and `content`. What is no message is refused where types are checked."""
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        for name, value in message.items() if isinstance(message, dict) else ():
            if name not in ("role", "content") and value is not None:
                shown = "messages.name" if name == "name" else f"messages[{i}].{name}"
                _judge(name, value, _MESSAGE_FIELDS, shown, ignored)


def _invalid(error: msgspec.ValidationError) -> Exception:
    """msgspec's message, with the field in front instead of behind."""
    match = _VALIDATION.match(str(error))
    what, where = (match["what"], match["where"]) if match else (str(error), None)
    missing = re.search(r"missing required field `(\w+)`", what)
    if missing:
        return bad_request(f"{missing[1]} is missing", param=missing[1], code="missing_field")
    what = what[:1].lower() + what[1:]
    return bad_request(f"{where}: {what}" if where else what, param=where or None, code="invalid_value")
