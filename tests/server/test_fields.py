"""The one table of fields: what is honoured, ignored and refused, and the words of every refusal."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pellucid.server.errors import ApiError
from pellucid.server.fields import FIELDS, parse_body
from pellucid.server.openai_types import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse_prompts

MESSAGES = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> tuple[CompletionBody, list[str]]:
    return parse_body(json.dumps({"prompt": "hi", **fields}).encode(), CompletionBody)


def chat(**fields: Any) -> tuple[ChatBody, list[str]]:
    return parse_body(json.dumps({"messages": MESSAGES, **fields}).encode(), ChatBody)


def refusal(call: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call(**fields)
    assert caught.value.status == 400
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_field_has_one_fate() -> None:
    names = [field.name for field in FIELDS]
    assert len(names) == len(set(names))
    honoured = set(CompletionBody.__struct_fields__) & set(ChatBody.__struct_fields__)
    assert not honoured & set(names)


@pytest.mark.parametrize("field", [f for f in FIELDS if f.fate == "harmless"], ids=lambda field: field.name)
def test_harmless_fields_are_named(field: Any) -> None:
    assert completion(**{field.name: "anything"})[1] == [field.name]
    assert completion(**{field.name: None})[1] == []


@pytest.mark.parametrize("field", [f for f in FIELDS if f.fate == "refused"], ids=lambda field: field.name)
def test_refused_fields_are_accepted_when_they_ask_for_nothing(field: Any) -> None:
    for value in (None, *field.neutral):
        assert chat(**{field.name: value})[1] == []
        assert completion(**{field.name: value})[1] == []
    error = refusal(chat, **{field.name: "something else"})
    assert (error.param, error.code) == (field.name, "unsupported_field")
    assert str(error).startswith(f"{field.name} is not supported; leave it out")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 0}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": False}, "top_logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_other_values_of_unsupported_fields_are_refused(fields: dict[str, Any], param: str) -> None:
    assert refusal(chat, **fields).param == param


def test_null_is_absent_at_every_level() -> None:
    body, ignored = completion(stream=True, stream_options={"include_usage": None}, user=None, max_tokens=None)
    assert body.stream_options is not None
    assert (body.stream_options.include_usage, ignored) == (False, [])


def test_unknown_fields_are_refused_by_name() -> None:
    error = refusal(completion, tempratur=0.5)
    assert (error.param, error.code) == ("tempratur", "unknown_field")
    assert refusal(chat, prompt="hi").param == "prompt"
    assert refusal(completion, messages=MESSAGES).param == "messages"


def test_what_clients_spell_out_is_accepted() -> None:
    body, ignored = completion(
        model="m", suffix=None, logprobs=None, best_of=1, n=1, seed=None, stop=None, logit_bias=None, top_k=-1, min_p=0,
        presence_penalty=0.0, frequency_penalty=0, repetition_penalty=1.0, stream_options=None, user="u",
        ignore_eos=True, max_tokens=4, temperature=0, echo=False,
    )  # fmt: skip
    assert (body.max_tokens, body.temperature, body.ignore_eos, ignored) == (4, 0.0, True, ["user"])
    assert body.sampling(max_tokens=4, choice=0).top_k == 0


@pytest.mark.parametrize(
    ("fields", "words", "param"),
    [
        ({"max_tokens": "x"}, "max_tokens: expected `int | null`, got `str`", "max_tokens"),
        ({"max_tokens": 0}, "max_tokens: expected `int` >= 1", "max_tokens"),
        ({"temperature": -1}, "temperature: expected `float` >= 0", "temperature"),
        ({"top_p": 0}, "top_p: expected `float` > 0", "top_p"),
        ({"n": True}, "n: expected `int`, got `bool`", "n"),
        ({"stop": [1]}, "stop[0]: expected `str`, got `int`", "stop[0]"),
        ({"stream_options": {"include": 1}}, "contains unknown field `include`", "stream_options"),
    ],
)
def test_wrong_types_are_one_line(fields: dict[str, Any], words: str, param: str) -> None:
    error = refusal(completion, **fields)
    assert words in str(error)
    assert error.param == param


@pytest.mark.parametrize(
    ("raw", "kind", "words"),
    [
        (b"", CompletionBody, "not valid JSON"),
        (b'{"prompt": "a"', CompletionBody, "not valid JSON"),
        (b'{"prompt": "\\ud800"}', CompletionBody, "not valid JSON"),
        (b'{"prompt": NaN}', CompletionBody, "not valid JSON"),
        (b"[1]", CompletionBody, "must be a JSON object"),
        (b"{}", CompletionBody, "prompt is missing"),
        (b'{"prompt": null}', CompletionBody, "prompt is missing"),
        (b"{}", ChatBody, "messages is missing"),
        (b'{"messages": "hi"}', ChatBody, "messages: expected `array`, got `str`"),
        (b'{"messages": ["hi"]}', ChatBody, "messages[0]: expected `object`, got `str`"),
        (b"{}", TokenizeBody, "prompt is missing"),
        (b'{"tokens": ["a"]}', DetokenizeBody, "tokens[0]: expected `int`"),
    ],
)
def test_bodies_that_are_none(raw: bytes, kind: Any, words: str) -> None:
    error = refusal(lambda: parse_body(raw, kind))
    assert words in str(error)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant", "content": "x", "tool_calls": [{"id": 1}]}, "messages[0].tool_calls"),
        ({"role": "user", "content": "x", "mood": "sad"}, "messages[0].mood"),
        ({"role": "tool", "content": "x", "tool_call_id": "1"}, "messages[0].tool_call_id"),
    ],
)
def test_messages_have_their_own_fields(message: dict[str, Any], param: str) -> None:
    assert refusal(chat, messages=[message]).param == param


def test_messages_as_the_openai_client_sends_them_back() -> None:
    reply = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": [], "audio": None}
    _, ignored = chat(messages=[{"role": "user", "content": "x", "name": "al"}, reply, *MESSAGES])
    assert ignored == ["messages.name"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"best_of": 3, "n": 2}, "best_of is 3; only best_of equal to n (2)"),
        ({"stream_options": {"include_usage": True}}, "stream_options needs stream: true"),
    ],
)
def test_fields_that_contradict_each_other(fields: dict[str, Any], words: str) -> None:
    body, _ = completion(**fields)
    assert words in str(refusal(body.check))


def test_token_limits_and_stops() -> None:
    assert chat(max_completion_tokens=7)[0].wanted_tokens() == 7
    assert chat(max_completion_tokens=7, max_tokens=7)[0].wanted_tokens() == 7
    assert chat()[0].wanted_tokens() is None
    assert "differ" in str(refusal(chat(max_completion_tokens=7, max_tokens=8)[0].wanted_tokens))
    assert completion(stop="a")[0].stops() == ["a"]
    for stop in ("", ["a", ""], ["a"] * 17):
        assert refusal(completion(stop=stop)[0].stops).param == "stop"


def test_every_choice_has_its_own_seed() -> None:
    body, _ = completion(seed=5, n=2)
    assert [body.sampling(max_tokens=1, choice=i).seed for i in range(2)] == [5, 6]


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ("", [""])],
)
def test_prompt_forms(prompt: Any, parsed: Any) -> None:
    assert parse_prompts(prompt) == parsed


@pytest.mark.parametrize("prompt", [[], [[]], [1, "a"], [True], [-1], [1.5], {}, 3, [["a"]]])
def test_prompts_that_are_none(prompt: Any) -> None:
    with pytest.raises(ApiError, match="prompt must be a string"):
        parse_prompts(prompt)
