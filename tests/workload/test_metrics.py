"""The metrics against hand-made byte streams whose answers are worked out by hand in the comments."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.core.errors import ConfigError
from pellucid.workload.compat import compat_columns
from pellucid.workload.metrics import SLO, Clocking, RequestRecord, measure, parse_seconds, summarise
from pellucid.workload.stream import Chunk, ReplyStream

OPEN, CLOSED = Clocking(open_loop=True), Clocking(open_loop=False)


def sse(payload: object) -> bytes:
    return b"data: " + (payload if isinstance(payload, bytes) else json.dumps(payload).encode()) + b"\n\n"


def delta(content: str | None = None, finish: str | None = None, **more: object) -> dict[str, object]:
    inner = {key: value for key, value in {"content": content, **more}.items() if value is not None}
    return {"choices": [{"index": 0, "delta": inner, "finish_reason": finish}]}


def text(
    content: str, num_tokens: int | None = None, finish: str | None = None, *, by_number: bool = False
) -> dict[str, object]:
    choice: dict[str, object] = {"index": 0, "text": content, "finish_reason": finish}
    if num_tokens is not None:
        choice |= {"num_tokens": num_tokens} if by_number else {"token_ids": [7] * num_tokens}
    return {"choices": [choice]}


def usage(completion: int, prompt: int = 10, cached: int | None = None) -> dict[str, object]:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **details}}


def play(*stamped: tuple[float, bytes]) -> ReplyStream:
    stream = ReplyStream()
    for at, data in stamped:
        stream.feed(data, at)
    stream.close()
    return stream


def record_of(stream: ReplyStream, *, scheduled: float = 0.0, sent: float = 0.0, requested: int = 0) -> RequestRecord:
    return RequestRecord(
        index=0,
        scheduled=scheduled,
        sent=sent,
        status=stream.status,
        requested=requested,
        chunks=stream.chunks,
        received=stream.completion_tokens,
        prompt_tokens=stream.prompt_tokens,
        cached_tokens=stream.cached_tokens,
        first_event=stream.first_event_at,
        first_answer=stream.first_answer_at,
        done=stream.done_at,
    )


@pytest.mark.parametrize("by_number", [False, True])
def test_multi_token_chunks(by_number: bool) -> None:
    """Chunks of 1, 3 and 2 tokens at 1.0, 1.3 and 1.5; due at 0.2, sent at 0.5."""
    stream = play(
        (1.0, sse(text("a", 1, by_number=by_number))),
        (1.3, sse(text("bcd", 3, by_number=by_number))),
        (1.5, sse(text("ef", 2, "length", by_number=by_number))),
        (1.6, sse(usage(6))),
        (1.7, sse(b"[DONE]")),
    )
    record = record_of(stream, scheduled=0.2, sent=0.5, requested=6)
    assert stream.status == "ok"
    assert OPEN.ttft(record) == pytest.approx(0.8)
    assert CLOSED.ttft(record) == pytest.approx(0.5)
    assert OPEN.e2e(record) == pytest.approx(1.3)
    assert record.icl() == pytest.approx([0.3, 0.2])
    assert record.itl() == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.1])
    assert record.tpot() == pytest.approx(0.5 / 5)
    assert record.stall() == pytest.approx(0.3)


def test_role_only_first_chunk_is_no_token_but_vllm_counts_it() -> None:
    stream = play(
        (1.0, sse({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})),
        (2.0, sse(delta("Hi"))),
        (2.5, sse(delta(" you", "stop"))),
        (2.5, sse(usage(2)) + sse(b"[DONE]")),
    )
    record = record_of(stream)
    assert OPEN.ttft(record) == 2.0
    assert stream.first_event_at == 1.0
    columns = compat_columns([record])
    assert columns["vllm"]["ttft"].p50 == 1.0
    assert columns["sglang"]["ttft"].p50 == 2.0
    assert columns["vllm"]["itl"].n == 2, "the tool sees a gap from the empty chunk to the first token as well"


def test_reasoning_and_tool_deltas_are_tokens() -> None:
    stream = play(
        (1.0, sse(delta(reasoning="hmm"))),
        (1.5, sse(delta(reasoning_content="so"))),
        (2.0, sse(delta("42"))),
        (2.2, sse(delta(tool_calls=[{"index": 0}]))),
        (2.3, sse(delta(finish="tool_calls"))),
        (2.4, sse(usage(4)) + sse(b"[DONE]")),
    )
    record = record_of(stream)
    assert OPEN.ttft(record) == 1.0
    assert stream.first_answer_at == 2.0
    assert [chunk.at for chunk in record.chunks] == [1.0, 1.5, 2.0, 2.2]
    assert record.itl() == pytest.approx([0.5, 0.5, 0.2]), "4 chunks, 4 tokens: one each"


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        (b"", "cut"),
        (sse({"error": {"message": "engine died"}}), "server-error"),
        (b"event: error\ndata: {}\n\n", "server-error"),
        (b"data: {broken\n\n", "malformed"),
        (b'data: {"choices": [{"text": 5}]}\n\n', "malformed"),
    ],
)
def test_a_stream_that_dies_is_never_a_success(ending: bytes, status: str) -> None:
    stream = play((1.0, sse(text("a", 1))), (1.4, ending))
    record = record_of(stream, requested=5)
    assert stream.status == status
    assert stream.detail
    assert OPEN.e2e(record) is None
    result = measure([record], clocking=OPEN, window=(0.0, 2.0))
    assert (result["attainment"], result["num_failed"], result["ttft"].n) == (0.0, 1, 0)
    assert result["failures"][status]["num_requests"] == 1
    assert result["output_tokens_per_second"] == 0.5, "its token did arrive inside the window"


def test_a_stream_without_tokens_fails_instead_of_measuring_zero() -> None:
    stream = play((1.0, sse(delta(finish="stop"))), (1.0, sse(b"[DONE]")))
    assert stream.status == "empty"
    assert measure([record_of(stream)], clocking=OPEN, window=(0.0, 1.0))["ttft"].n == 0


def test_a_late_done_moves_nothing_but_the_tools_that_count_it() -> None:
    stream = play((1.0, sse(text("a", 1))), (2.0, sse(text("b", 1, "stop"))), (9.0, sse(usage(2)) + sse(b"[DONE]")))
    record = record_of(stream)
    assert OPEN.e2e(record) == 2.0
    columns = compat_columns([record])
    assert columns["vllm"]["e2el"].max == 2.0
    assert columns["sglang"]["e2el"].max == 9.0
    assert [columns["inference-perf"][name].max for name in ("ttft", "tpot", "ntpot", "request_latency")] == [
        1.0, 1.0, 4.5, 9.0,
    ]  # fmt: skip
    assert columns["genai-bench"]["tpot"].max == 8.0, "until the stream has ended"
    assert columns["llmperf"]["inter_token_latency"].max == 1.0, "the wait for the first token is in it"
    assert columns["llmperf"]["end_to_end_latency"].max == 9.0


def test_goodput_as_other_tools_count_it() -> None:
    """Two answers within the bounds, one of them of a single token, and one too slow between tokens."""
    quick = play((0.1, sse(text("a", 1))), (0.2, sse(text("b", 1, "stop"))), (0.2, sse(usage(2)) + sse(b"[DONE]")))
    single = play((0.1, sse(text("a", 1, "stop"))), (0.2, sse(usage(1)) + sse(b"[DONE]")))
    slow = play((0.1, sse(text("a", 1))), (2.0, sse(text("b", 1, "stop"))), (2.0, sse(usage(2)) + sse(b"[DONE]")))
    records = [record_of(stream) for stream in (quick, single, slow)]
    columns = compat_columns(records, SLO(ttft=0.5, tpot=0.5))
    assert columns["vllm"]["goodput"] == pytest.approx(2 / 2.0), "over the whole run; one token counts as TPOT 0"
    assert columns["inference-perf"]["goodput_percentage"] == pytest.approx(100 / 3), "one token has no TPOT: missed"
    assert "goodput" not in compat_columns(records)["vllm"]


def test_counts_from_continuous_usage() -> None:
    """completion_tokens grows 2, 2 (a flush of held text: no token), 5."""
    stream = play(
        (1.0, sse({**text("ab"), "usage": {"prompt_tokens": 9, "completion_tokens": 2}})),
        (1.2, sse({**text("!"), "usage": {"prompt_tokens": 9, "completion_tokens": 2}})),
        (1.6, sse({**text("cde", finish="length"), "usage": {"prompt_tokens": 9, "completion_tokens": 5}})),
        (1.7, sse(b"[DONE]")),
    )
    assert stream.chunks == [Chunk(1.0, 2), Chunk(1.6, 3)]
    assert record_of(stream).tpot() == pytest.approx(0.6 / 3)


def test_unknown_counts_are_said_to_be_unknown() -> None:
    """Two chunks but five tokens: nobody knows which had how many."""
    stream = play((1.0, sse(text("ab"))), (2.0, sse(text("cde", finish="stop"))), (2.0, sse(usage(5)) + sse(b"[DONE]")))
    record = record_of(stream)
    assert record.itl() is None
    assert record.tpot() == pytest.approx(1.0 / 4)
    result = measure([record], clocking=OPEN, window=(0.0, 2.0))
    assert result["num_counts_unknown"] == 1
    assert (result["itl"].n, result["icl"].n) == (0, 1)
    assert result["output_tokens_per_second"] == pytest.approx(2.5)


def test_one_chunk_has_no_tpot() -> None:
    record = record_of(play((1.0, sse(text("a", 1, "length"))), (1.0, sse(b"[DONE]"))), requested=1)
    assert record.tpot() is None
    assert record.stall() is None
    assert SLO(ttft=2.0, tpot=0.001).holds(record, OPEN)


@given(st.lists(st.integers(1, 400), max_size=12))
def test_bytes_may_be_cut_anywhere(cuts: list[int]) -> None:
    whole = (
        sse(delta("a"))
        + b": keep-alive\r\n\r\n"
        + sse(delta("é", "stop")).replace(b"\n", b"\r\n")
        + sse(usage(2, cached=4))
    )
    whole += sse(b"[DONE]")
    stream, at = ReplyStream(), 0
    for cut in [*sorted(min(cut, len(whole)) for cut in cuts), len(whole)]:
        stream.feed(whole[at:cut], 1.0)
        at = max(at, cut)
    assert stream.close() == "ok"
    assert len(stream.chunks) == 2
    assert (stream.prompt_tokens, stream.completion_tokens, stream.cached_tokens) == (10, 2, 4)


def test_data_over_several_lines_is_one_event() -> None:
    stream = play((1.0, b'data: {"choices":\ndata: [{"text": "a", "finish_reason": "stop"}]}\n\n'))
    assert (stream.status, len(stream.chunks)) == ("ok", 1)


def test_the_tools_disagree_as_documented() -> None:
    """5 tokens in chunks 1, 4 at 1.0 and 2.0, sent at 0.0."""
    stream = play(
        (1.0, sse(text("a", 1))), (2.0, sse(text("bcde", 4, "length"))), (2.0, sse(usage(5)) + sse(b"[DONE]"))
    )
    columns = compat_columns([record_of(stream)])
    assert columns["vllm"]["itl"].p50 == 1.0
    assert columns["sglang"]["itl"].p50 == 0.25
    assert columns["aiperf"]["itl"].p50 == 0.25
    assert columns["guidellm"]["tpot"].p50 == pytest.approx(2.0 / 5)
    assert columns["vllm"]["tpot"].p50 == 0.25


def made(ttft: float, gaps: list[float], **fields: object) -> RequestRecord:
    at, chunks = ttft, [Chunk(ttft, 1)]
    for gap in gaps:
        at += gap
        chunks.append(Chunk(at, 1))
    values: dict[str, object] = {
        "index": 0,
        "scheduled": 0.0,
        "sent": 0.0,
        "status": "ok",
        "requested": len(chunks),
        "chunks": chunks,
    }
    return RequestRecord(**{**values, **fields})  # type: ignore[arg-type]


def test_goodput_and_attainment_are_over_offered_requests() -> None:
    slo = SLO.parse("ttft=1s, itl=100ms, stall=300ms")
    records = [
        made(0.5, [0.09] * 9),
        made(1.5, [0.09] * 9),
        made(0.5, [0.2] * 9),
        made(0.5, [0.05] * 8 + [0.4]),
        made(0.5, [0.09] * 9, requested=20),
        made(0.5, [0.09] * 9, status="cut"),
        made(0.5, [], status="http-429", chunks=[]),
        made(0.9, [0.01]),
    ]
    assert [slo.holds(record, OPEN) for record in records] == [True, False, False, False, False, False, False, True]
    result = measure(records, clocking=OPEN, window=(0.0, 4.0), slo=slo)
    assert result["attainment"] == 2 / 8
    assert result["goodput"] == 2 / 4.0
    assert result["gaps_over_slo"] == pytest.approx((9 + 1) / (9 * 5 + 1)), "nine of 0.2 s and one of 0.4 s"


def test_throughput_counts_tokens_inside_the_window_only() -> None:
    result = measure([made(0.5, [1.0, 1.0, 1.0])], clocking=OPEN, window=(1.0, 3.0))
    assert result["output_tokens_per_second"] == 2 / 2.0


def test_tbt10_is_the_mean_of_the_worst_tenth() -> None:
    record = made(0.0, [0.01] * 18 + [0.5, 0.3])
    assert record.tbt10() == pytest.approx(0.4)
    assert record.stall() == pytest.approx(0.5)


def test_cached_observed_beside_expected() -> None:
    records = [
        made(0.5, [0.1], prompt_tokens=100, cached_tokens=64, expected_cached=80),
        made(0.5, [0.1], prompt_tokens=100, cached_tokens=None, expected_cached=0),
    ]
    assert measure(records, clocking=OPEN, window=(0.0, 1.0))["cached"] == {
        "observed": 0.64,
        "expected": 0.4,
        "num_told": 1,
    }


def test_low_n_is_marked() -> None:
    assert summarise([]).n == 0
    assert summarise([1.0] * 50).low_n == ("p90", "p99")
    assert summarise([1.0] * 999).low_n == ("p99",)
    assert summarise([None, *range(1000)]).low_n == ()
    summary = summarise(float(i) for i in range(101))
    assert (summary.p50, summary.p90, summary.p99, summary.max, summary.mean) == (50.0, 90.0, 99.0, 100.0, 50.0)


@pytest.mark.parametrize(
    ("given_text", "seconds"), [("2s", 2.0), ("100ms", 0.1), ("1.5m", 90.0), ("3", 3.0), ("250us", 0.00025)]
)
def test_times(given_text: str, seconds: float) -> None:
    assert parse_seconds(given_text) == pytest.approx(seconds)


@pytest.mark.parametrize("wrong", ["ttft", "ttft=", "ttft=fast", "speed=3s", "ttft=-1s", "ttft=3parsec"])
def test_bad_slos(wrong: str) -> None:
    with pytest.raises(ConfigError):
        SLO.parse(wrong)
