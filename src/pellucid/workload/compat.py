"""What other load tools would have printed from the same bytes, so that figures can be compared with theirs.

Each function states the tool's own definition, as read in its source. None of these is a headline of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pellucid.workload.metrics import RequestRecord, Summary, summarise


def compat_columns(records: Sequence[RequestRecord]) -> dict[str, dict[str, Any]]:
    """For each tool the metrics it names, over the requests that it would count as successful."""
    good = [r for r in records if r.ok and r.first is not None]
    return {"vllm": _vllm(good), "sglang": _sglang(good), "aiperf": _aiperf(good), "guidellm": _guidellm(good)}


def _vllm(records: Sequence[RequestRecord]) -> dict[str, Summary]:
    """`vllm bench serve`: everything from sending; the first event with choices is the first token, even a role-only
    one; TPOT = (E2E - TTFT) / (N - 1); "ITL" is the gap between chunks, the one after the first event included."""
    return {
        "ttft": summarise(_first_event(r) - r.sent for r in records),
        "tpot": summarise(_per_token(_last(r) - _first_event(r), _outputs(r) - 1) for r in records),
        "itl": summarise(gap for r in records for gap in _gaps_from(r, _first_event(r))),
        "e2el": summarise(_last(r) - r.sent for r in records),
    }


def _sglang(records: Sequence[RequestRecord]) -> dict[str, Summary]:
    """`sglang.bench_serving`: first non-empty text; ITL amortised over the tokens of a chunk; E2E ends with the last
    event, `[DONE]` included."""
    return {
        "ttft": summarise(_first(r) - r.sent for r in records),
        "itl": summarise(gap for r in records for gap in (r.itl() or [])),
        "tpot": summarise(_per_token(_end(r) - _first(r), _outputs(r) - 1) for r in records),
        "e2el": summarise(_end(r) - r.sent for r in records),
    }


def _aiperf(records: Sequence[RequestRecord]) -> dict[str, Summary]:
    """aiperf: "ITL" is one mean a request, (E2E - TTFT) / (N - 1); "ICL" the gap between chunks."""
    return {
        "ttft": summarise(_first(r) - r.sent for r in records),
        "itl": summarise(_per_token(_last(r) - _first(r), _outputs(r) - 1) for r in records),
        "icl": summarise(gap for r in records for gap in r.icl()),
        "e2el": summarise(_last(r) - r.sent for r in records),
    }


def _guidellm(records: Sequence[RequestRecord]) -> dict[str, Summary]:
    """guidellm: TPOT = (a_last - sent) / N, first token included; "ITL" = (a_last - a_1) / (N - 1), one a request."""
    return {
        "ttft": summarise(_first(r) - r.sent for r in records),
        "tpot": summarise(_per_token(_last(r) - r.sent, _outputs(r)) for r in records),
        "itl": summarise(_per_token(_last(r) - _first(r), _outputs(r) - 1) for r in records),
        "e2el": summarise(_last(r) - r.sent for r in records),
    }


def _first(record: RequestRecord) -> float:
    assert record.first is not None
    return record.first


def _last(record: RequestRecord) -> float:
    assert record.last is not None
    return record.last


def _first_event(record: RequestRecord) -> float:
    return _first(record) if record.first_event is None else record.first_event


def _end(record: RequestRecord) -> float:
    return _last(record) if record.done is None else record.done


def _outputs(record: RequestRecord) -> int:
    return record.num_output() or len(record.chunks)


def _per_token(seconds: float, num_tokens: int) -> float | None:
    return seconds / num_tokens if num_tokens > 0 else None


def _gaps_from(record: RequestRecord, start: float) -> list[float]:
    """Gaps between events from the first one on; where that one bore tokens itself, the gaps between chunks."""
    if start == _first(record):
        return record.icl()
    return [_first(record) - start, *record.icl()]
