"""What a run measured, from the records of its requests: each word means one thing, written beside its formula.

Notation: a request was due at `scheduled`, written to the socket at `sent`, and its token-bearing chunks arrived at
`a_1 .. a_k` with `n_1 .. n_k` tokens, `N` in all. A quantity that a request does not have (TPOT of a one-chunk
answer, any time of a failed request) is None and is never counted as 0.

    TTFT     a_1 - scheduled in open loop, a_1 - sent in closed loop
    ICL      a_j - a_{j-1}: the gap between chunks, what a reader sees
    ITL      (a_j - a_{j-1}) / n_j, counted n_j times: the gap amortised over the tokens of the chunk
    TPOT     (a_k - a_1) / (N - n_1), one value a request
    stall    the largest ICL of a request; TBT10: the mean of its largest tenth of gaps (Mooncake, FAST 2025, 5.1)
    E2E      a_k - scheduled (open loop) or - sent: the last token, not [DONE] and not the closed connection

Where a server tells no counts, each chunk is taken as one token if the total agrees with that; otherwise ITL is None
for the request and TPOT assumes one token in the first chunk. The summary says for how many requests that was so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pellucid.core.errors import ConfigError
from pellucid.workload.stream import OK, Chunk

LOW_N_P99 = 1000
LOW_N_P90 = 100
TBT_SHARE = 0.1


class RequestRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Everything the client saw of one request. Times are seconds from the start of the run.

    `status` is "ok" or why it failed. `requested` and `received` are output tokens (`received` None: not told).
    `cached_tokens` is what the server reported, `expected_cached` what the workload shares with earlier requests.
    `first_event`, `first_answer`, `done` serve the compatibility columns. Requests of the warm-up are never recorded.
    """

    index: int
    scheduled: float
    sent: float
    status: str
    requested: int
    chunks: list[Chunk] = []
    received: int | None = None
    detail: str = ""
    group: str = ""
    tenant: str = ""
    session: str = ""
    turn: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    expected_cached: int | None = None
    first_event: float | None = None
    first_answer: float | None = None
    done: float | None = None
    finish_reason: str | None = None
    ledger: dict[str, Any] | None = None

    @property
    def ok(self) -> bool:
        """Whether the reply arrived whole."""
        return self.status == OK

    @property
    def first(self) -> float | None:
        """When the first token arrived."""
        return self.chunks[0].at if self.chunks else None

    @property
    def last(self) -> float | None:
        """When the last token arrived."""
        return self.chunks[-1].at if self.chunks else None

    def num_output(self) -> int | None:
        """Tokens received: as the server counted them, else the sum over chunks; None where neither is told."""
        if self.received is not None:
            return self.received
        counts = [chunk.num_tokens for chunk in self.chunks]
        return None if None in counts else sum(n for n in counts if n is not None)

    def counts(self) -> list[int] | None:
        """Tokens of each chunk; one each where only the total is told and agrees; else None."""
        counts = [chunk.num_tokens for chunk in self.chunks]
        if None not in counts:
            return [n for n in counts if n is not None]
        return [1] * len(counts) if self.received == len(counts) else None

    def icl(self) -> list[float]:
        """Gaps between chunks, in seconds."""
        return [after.at - before.at for before, after in zip(self.chunks, self.chunks[1:])]

    def itl(self) -> list[float] | None:
        """Gaps amortised over their tokens: one value for each token after the first chunk. None: counts unknown."""
        counts = self.counts()
        if counts is None:
            return None
        return [gap / n for gap, n in zip(self.icl(), counts[1:]) for _ in range(n)]

    def tpot(self) -> float | None:
        """Mean time per output token after the first chunk."""
        total = self.num_output()
        if len(self.chunks) < 2 or total is None:
            return None
        num_first = self.chunks[0].num_tokens or 1
        return (self.chunks[-1].at - self.chunks[0].at) / (total - num_first) if total > num_first else None

    def stall(self) -> float | None:
        """The largest gap between chunks."""
        return max(self.icl(), default=None)

    def tbt10(self) -> float | None:
        """Mean of the largest tenth of the gaps (at least one)."""
        gaps = sorted(self.icl(), reverse=True)
        worst = gaps[: max(1, round(len(gaps) * TBT_SHARE))]
        return sum(worst) / len(worst) if worst else None


class Clocking(NamedTuple):
    """Where a request's clock starts: at its schedule (open loop) or when it was sent (closed loop)."""

    open_loop: bool

    def start(self, record: RequestRecord) -> float:
        return record.scheduled if self.open_loop else record.sent

    def ttft(self, record: RequestRecord) -> float | None:
        """Time to first token."""
        return None if record.first is None else record.first - self.start(record)

    def e2e(self, record: RequestRecord) -> float | None:
        """Time to last token of a reply that arrived whole."""
        return None if record.last is None or not record.ok else record.last - self.start(record)


class SLO(NamedTuple):
    """What a good request keeps, in seconds; None: no demand. `stall` bounds the largest gap, `tbt10` the worst
    tenth."""

    ttft: float | None = None
    tpot: float | None = None
    stall: float | None = None
    tbt10: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> SLO:
        """From `ttft=2s,itl=100ms`. `itl` is the request's mean inter-token latency, which is its TPOT."""
        bounds: dict[str, float] = {}
        for part in text.split(","):
            name, equals, value = part.strip().partition("=")
            name = "tpot" if name == "itl" else name
            if not equals or name not in cls._fields:
                raise ConfigError(
                    f"--slo {part.strip()!r}: expected NAME=TIME with a name of ttft, itl, tpot, stall, tbt10, e2e"
                )
            bounds[name] = parse_seconds(value)
        return cls(**bounds)

    def holds(self, record: RequestRecord, clocking: Clocking) -> bool:
        """Whether the request arrived whole, at the length asked for, within every bound."""
        if not record.ok or record.num_output() not in (None, record.requested):
            return False
        measured = (clocking.ttft(record), record.tpot(), record.stall(), record.tbt10(), clocking.e2e(record))
        return all(bound is None or value is None or value <= bound for bound, value in zip(self, measured))


def parse_seconds(text: str) -> float:
    """`2s`, `100ms`, `1.5m`, `500us`; a plain number is seconds."""
    units = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
    number = text.strip().rstrip("umsh")
    unit = text.strip()[len(number) :] or "s"
    try:
        value = float(number) * units[unit]
    except (ValueError, KeyError):
        raise ConfigError(f"{text!r} is not a time; expected a number with us, ms, s, m or h") from None
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{text!r} is not a time of 0 or more")
    return value


class Summary(msgspec.Struct, frozen=True, omit_defaults=True):
    """A distribution in seconds. Percentiles interpolate linearly; `low_n` marks those with too few values behind them
    (p99 wants 1,000, p90 wants 100)."""

    n: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None
    low_n: tuple[str, ...] = ()


def summarise(values: Iterable[float | None]) -> Summary:
    """The distribution of the values that exist."""
    known = np.array([value for value in values if value is not None])
    if not len(known):
        return Summary(0)
    p50, p90, p99 = np.percentile(known, [50, 90, 99]).tolist()
    low = (("p90",) if len(known) < LOW_N_P90 else ()) + (("p99",) if len(known) < LOW_N_P99 else ())
    return Summary(len(known), float(known.mean()), p50, p90, p99, float(known.max()), low)


def measure(
    records: Sequence[RequestRecord], *, clocking: Clocking, window: tuple[float, float], slo: SLO | None = None
) -> dict[str, Any]:
    """The measurements of a run under their stable names.

    `window` (seconds) is where throughput is counted: tokens that arrived inside it, divided by its length. Goodput and
    attainment count *offered* requests: one that failed, was refused or did not finish is bad. Without an SLO a request
    is good when it arrived whole at the length asked for.
    """
    answered = [r for r in records if r.ok]
    seconds = max(window[1] - window[0], 1e-9)
    good = sum((slo or SLO()).holds(r, clocking) for r in records)
    gaps = [r.itl() for r in answered]
    return {
        "ttft": summarise(clocking.ttft(r) for r in answered),
        "itl": summarise(gap for row in gaps if row is not None for gap in row),
        "icl": summarise(gap for r in answered for gap in r.icl()),
        "tpot": summarise(r.tpot() for r in answered),
        "e2e": summarise(clocking.e2e(r) for r in answered),
        "stall": summarise(r.stall() for r in answered),
        "tbt10": summarise(r.tbt10() for r in answered),
        "ttft_send": summarise(None if r.first is None else r.first - r.sent for r in answered),
        "send_lag": summarise(r.sent - r.scheduled for r in records),
        "output_tokens_per_second": tokens_inside(records, window) / seconds,
        "uncached_prompt_tokens_per_second": _uncached_prompt_tokens(answered, window) / seconds,
        "goodput": good / seconds,
        "attainment": good / len(records) if records else None,
        "gaps_over_slo": _gaps_over(answered, (slo or SLO()).tpot),
        "window_seconds": seconds,
        "num_requests": len(records),
        "num_failed": len(records) - len(answered),
        "failures": _failures(records),
        "num_counts_unknown": sum(row is None for row in gaps),
        "cached": _cached(answered),
    }


def tokens_inside(records: Iterable[RequestRecord], window: tuple[float, float]) -> float:
    """Output tokens that arrived inside the window, those of requests that failed later included."""
    total = 0.0
    for record in records:
        counts = record.counts()
        if counts is None:
            share = (record.num_output() or len(record.chunks)) / len(record.chunks) if record.chunks else 0.0
            counts_or_share: Sequence[float] = [share] * len(record.chunks)
        else:
            counts_or_share = counts
        total += sum(n for chunk, n in zip(record.chunks, counts_or_share) if window[0] <= chunk.at <= window[1])
    return total


def _uncached_prompt_tokens(records: Iterable[RequestRecord], window: tuple[float, float]) -> int:
    inside = [r for r in records if r.first is not None and window[0] <= r.first <= window[1]]
    return sum((r.prompt_tokens or 0) - (r.cached_tokens or 0) for r in inside)


def _gaps_over(records: Iterable[RequestRecord], bound: float | None) -> float | None:
    """Share of all chunk gaps that are longer than the objective for one token; None without an objective or a gap."""
    gaps = [gap for record in records for gap in record.icl()]
    return None if bound is None or not gaps else sum(gap > bound for gap in gaps) / len(gaps)


def _failures(records: Iterable[RequestRecord]) -> dict[str, dict[str, Any]]:
    """How many failed in which way, with one example each."""
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        if not record.ok:
            entry = found.setdefault(record.status, {"num_requests": 0, "example": record.detail})
            entry["num_requests"] += 1
    return found


def _cached(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Prompt tokens that the server says came from its cache, beside what the workload shares."""
    told = [r for r in records if r.cached_tokens is not None and r.prompt_tokens]
    expected = [r for r in records if r.expected_cached is not None and r.prompt_tokens]
    return {
        "observed": _share(told, lambda r: r.cached_tokens or 0),
        "expected": _share(expected, lambda r: r.expected_cached or 0),
        "num_told": len(told),
    }


def _share(records: Sequence[RequestRecord], part: Callable[[RequestRecord], int]) -> float | None:
    total = sum(r.prompt_tokens or 0 for r in records)
    return sum(map(part, records)) / total if total else None
