"""Requests survive JSON unchanged, and refuse what makes no sense."""

from __future__ import annotations

import json

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pellucid.core.errors import ConfigError
from pellucid.core.request import Request, SamplingParams

SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 99),
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    top_p=st.sampled_from([0.1, 1.0]),
    top_k=st.integers(0, 5),
    min_p=st.sampled_from([0.0, 0.2]),
    seed=st.none() | st.integers(0, 3),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(st.integers(0, 9), max_size=3).map(tuple),
)
REQUESTS = st.builds(
    Request,
    id=st.text(min_size=1),
    prompt=st.lists(st.integers(0, 99), min_size=1).map(tuple),
    sampling=SAMPLING,
    arrival=st.sampled_from([0.0, 1.5]),
    tenant=st.text(),
    priority=st.integers(-1, 1),
    deadline=st.none() | st.sampled_from([0.0, 2.0]),
    cache_key=st.binary(),
    match_limit=st.none() | st.integers(0, 3),
    block_keys=st.none() | st.lists(st.integers(0, 9)).map(tuple),
)


@given(REQUESTS)
def test_json_brings_back_an_equal_request(request):
    assert Request.from_json(json.loads(json.dumps(request.to_json()))) == request


def test_defaults_are_not_written():
    assert Request("a", (1,)).to_json() == {"id": "a", "prompt": [1], "sampling": {}}


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", 0), ("temperature", -0.1), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -1), ("min_p", 1.5)],
)
def test_impossible_sampling_is_refused_with_the_value(field, value):
    with pytest.raises(ConfigError, match=rf"{field} is {value}"):
        SamplingParams(**{field: value})
    with pytest.raises(ConfigError, match="temperature is nan"):
        SamplingParams(temperature=float("nan"))


def test_an_empty_prompt_is_refused():
    with pytest.raises(ConfigError, match="empty prompt"):
        Request("a", ())
