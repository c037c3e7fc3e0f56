"""What other load tools would have printed from the same bytes, so that figures can be compared with theirs.

Each function states the tool's own definition, as read in its source. None of these is a headline of ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pellucid.workload.metrics import SLO, RequestRecord, Summary, summarise

Columns = dict[str, Summary | float]


def compat_columns(records: Sequence[RequestRecord], slo: SLO | None = None) -> dict[str, Columns]:
    """For each tool the metrics it names, over the requests that it would count as successful; with an SLO also the
    goodput of those that know the word."""
    good = [r for r in records if r.ok and r.first is not None]
    columns: dict[str, Columns] = {
        "vllm": {**_vllm(good)},
        "sglang": {**_sglang(good)},
        "aiperf": {**_aiperf(good)},
        "guidellm": {**_guidellm(good)},
        "inference-perf": {**_inference_perf(good)},
        "genai-bench": {**_genai_bench(good)},
        "llmperf": {**_llmperf(good)},
    }
    if slo is not None and good:
        columns["vllm"]["goodput"] = _vllm_goodput(good, slo)
        columns["inference-perf"]["goodput_percentage"] = _inference_perf_goodput(good, slo)
    return columns


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


def _inference_perf(records: Sequence[RequestRecord]) -> dict[str, Summary]:
    """inference-perf: TTFT and TPOT = (a_last - a_1) / (N - 1) only of replies with more than one token; NTPOT = whole
    request / N. (Its ITL counts the tokens of a chunk with a tokenizer of its own, and is left out.)"""
    several = [r for r in records if _outputs(r) > 1]
    return {
        "ttft": summarise(_first(r) - r.sent for r in several),
        "tpot": summarise(_per_token(_last(r) - _first(r), _outputs(r) - 1) for r in several),
        "ntpot": summarise(_per_token(_end(r) - r.sent, _outputs(r)) for r in records),
        "request_latency": summarise(_end(r) - r.sent for r in records),
    }


def _genai_bench(records: Sequence[RequestRecord]) -> dict[str, Summary]:
    """genai-bench: first non-empty content or reasoning; everything else until the stream has ended, so that
    TPOT = (E2E - TTFT) / (N - 1) holds the closing events as well."""
    return {
        "ttft": summarise(_first(r) - r.sent for r in records),
        "tpot": summarise(_per_token(_end(r) - _first(r), _outputs(r) - 1) for r in records),
        "e2e_latency": summarise(_end(r) - r.sent for r in records),
    }


def _llmperf(records: Sequence[RequestRecord]) -> dict[str, Summary]:
    """llmperf: "inter token latency" sums the gaps with the time to the first token among them, and divides by all
    tokens: (a_last - sent) / N, one a request. (It counts tokens with a Llama tokenizer; here they are the server's.)
    """
    return {
        "ttft": summarise(_first(r) - r.sent for r in records),
        "inter_token_latency": summarise(_per_token(_last(r) - r.sent, _outputs(r)) for r in records),
        "end_to_end_latency": summarise(_end(r) - r.sent for r in records),
    }


def _vllm_goodput(records: Sequence[RequestRecord], slo: SLO) -> float:
    """`vllm bench serve --goodput`: requests a second, over the whole run, that keep TTFT, TPOT and E2EL. An answer of
    one token has a TPOT of 0; it knows no other bound."""
    kept = 0
    for r in records:
        first, steps = _first_event(r), _outputs(r) - 1
        values = (first - r.sent, _per_token(_last(r) - first, steps) or 0.0, _last(r) - r.sent)
        kept += _within(values, (slo.ttft, slo.tpot, slo.e2e))
    duration = max(_end(r) for r in records) - min(r.sent for r in records)
    return kept / duration if duration > 0 else 0.0


def _inference_perf_goodput(records: Sequence[RequestRecord], slo: SLO) -> float:
    """inference-perf: per cent of the *successful* requests that keep TTFT, TPOT and request latency; a reply of one
    token has neither TTFT nor TPOT, and a missing value misses."""
    kept = 0
    for r in records:
        several = _outputs(r) > 1
        first = _first(r) - r.sent if several else math.inf
        step = _per_token(_last(r) - _first(r), _outputs(r) - 1) if several else math.inf
        kept += _within((first, step, _end(r) - r.sent), (slo.ttft, slo.tpot, slo.e2e))
    return 100.0 * kept / len(records)


def _within(values: Sequence[float | None], bounds: Sequence[float | None]) -> bool:
    return all(bound is None or (value is not None and value <= bound) for value, bound in zip(values, bounds))


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
